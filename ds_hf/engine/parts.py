"""The parts of one training set-up, made from the plan and wired to each other: ``make_parts``, for ``builder``.

Order: marks on the model -> units and buffers planned -> storage and links -> for each buffer its values, master and
gradients -> reducer -> optimizer -> hooks. Which buffers there are is ``zero/planning.py``; here they are made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ds_hf.config.plan import StatePlan, nonfinite_mode
from ds_hf.config.types import Config
from ds_hf.engine.accumulation import Accumulation, BatchSizes, accumulation_of
from ds_hf.engine.casting import place_buffers, set_buffer_dtypes
from ds_hf.engine.comm import peers as peer_memory
from ds_hf.engine.comm.block_collectives import BlockSums, Feedback
from ds_hf.engine.comm.mesh import Axis, Mesh, compute_device
from ds_hf.engine.comm.peer_sums import PeerSums
from ds_hf.engine.comm.peers import Peers, open_peers
from ds_hf.engine.comm.streams import CommStream
from ds_hf.engine.events import Events
from ds_hf.engine.ops import library
from ds_hf.engine.ops.blocks import BlockFormat
from ds_hf.engine.ops.split_master import write_split
from ds_hf.engine.optim.base import TensorwiseOptimizer
from ds_hf.engine.optim.loss_scaler import build_loss_scaler
from ds_hf.engine.optim.muon import MuonWithAuxAdam
from ds_hf.engine.optim.offloading import Offload, accumulation_dtype, build_offload
from ds_hf.engine.optim.onebit.base import OneBitOptimizer
from ds_hf.engine.optim.outcome import NonFinite
from ds_hf.engine.optim.sharded import OptimizerPolicy, ShardedOptimizer
from ds_hf.engine.optim.store import StateStore
from ds_hf.engine.optim.streaming import is_elementwise, streamed_update
from ds_hf.engine.optim.unfreezing import Unfreezing
from ds_hf.engine.zero.buffer import FlatBuffer, home_of, logical_shape, own_dtype
from ds_hf.engine.zero.comm_dtype import COMM_DTYPE, mark_comm_dtypes
from ds_hf.engine.zero.cut import is_cut
from ds_hf.engine.zero.gathering import CopiedGathering, Gathering, RoundedGathering
from ds_hf.engine.zero.gradients import GradientBuffer, GradientPolicy, summed_by_copies
from ds_hf.engine.zero.hooks import UnitHooks
from ds_hf.engine.zero.layout import Labels
from ds_hf.engine.zero.leaf import mark_leaves
from ds_hf.engine.zero.model_parallel import mark_cuts, warn_of_differences
from ds_hf.engine.zero.packed import (
    PackedBuffer,
    check_packed,
    is_packed,
    move_packed,
    packed_parts,
    shards_packed,
)
from ds_hf.engine.zero.planning import (
    BufferSpec,
    UnitPolicy,
    plan_buffers,
    plan_units,
    tell_common_memory,
    tell_lost_format,
)
from ds_hf.engine.zero.reduction import Reducer
from ds_hf.engine.zero.replicas import replicas_of
from ds_hf.engine.zero.second_shard import SecondShard
from ds_hf.engine.zero.sharing import Sharing, plan_sharing
from ds_hf.engine.zero.unit import Prefetch, Unit
from ds_hf.errors import ConfigError, Fault
from ds_hf.host import known_processes
from ds_hf.log import warn_once

__all__ = ["EngineParts", "make_parts"]


@dataclass(frozen=True)
class EngineParts:
    """Attributes:
    plan: the state plan. mesh: the processes. device: where the model computes.
    compute_dtype: 16-bit dtype of the model, ``None`` when it keeps its own.
    units, accumulation, reducer, hooks, optimizer, unfreezing, events: see their modules.
    param_names: id of each parameter -> its first name in the model.
    """

    plan: StatePlan
    mesh: Mesh
    device: torch.device
    compute_dtype: torch.dtype | None
    units: list[Unit]
    accumulation: Accumulation
    reducer: Reducer
    hooks: UnitHooks
    optimizer: ShardedOptimizer | None
    unfreezing: Unfreezing
    param_names: dict[int, str]
    events: Events


def make_parts(
    settings: Config,
    plan: StatePlan,
    mesh: Mesh,
    model: nn.Module,
    inner: Optimizer | None,
    optimizer_type: type[ShardedOptimizer],
    *,
    whole_batches: bool = False,
) -> EngineParts:
    """Lay the states of ``model`` out and wire what trains them. All ranks call it.

    Args:
        inner: the optimizer over the model's own parameters; ``None`` for an engine that only infers.
        optimizer_type: what is made around it.
        whole_batches: the engine runs all micro-batches of a step in one call.

    Raises:
        ConfigError: the model, the optimizer and the configuration do not go together.
    """
    device = compute_device()
    group_of, waiting = _prepare(settings, plan, mesh, model, inner, device)
    policy = _unit_policy(settings, plan)
    managed, names = _managed(model, plan), _parameter_names(model)
    shared = any(home_of(param) is not None for param in managed)  # with another engine
    sharing = plan_sharing(managed, group_of, names) if shared else Sharing()
    homes = partial(replicas_of, mesh=mesh)
    planned = plan_units(model, managed, policy, group_of, homes, sharing.elsewhere)
    split = _splits_masters(settings, plan, device, inner)
    offload = build_offload(settings, plan, mesh, device, _managed(model, plan), inner, splits_masters=split)
    states = _States(settings, plan, device, offload, split, _links(settings, plan, mesh, device, planned))
    if isinstance(inner, OneBitOptimizer):
        states.reduces = _connect(inner, settings, plan, mesh)
    for unit, specs in planned.items():
        for spec in specs:
            states.add(unit, spec)
    _place_rest(settings, mesh, model, policy.dtype, device)
    if device.type == "cuda":  # what the buffers have replaced left pieces into which nothing that comes fits
        torch.cuda.empty_cache()
    units, waits = list(planned), device.type == "cpu" and not plan.shards_optimizer
    accumulation, often = accumulation_of(settings, whole_batches=whole_batches), plan.reduces_every_micro_batch
    reducer = Reducer(units, states.gradients, often, at_the_end=waits, world=mesh.stage, accumulation=accumulation)
    optimizer = None
    if inner is not None:
        optimizer = _make_optimizer(settings, plan, mesh, inner, states, reducer, names, optimizer_type)
    for unit in units:
        for buffer in unit.buffers:
            buffer.count_users()
            buffer.param_names = tuple(names[id(param)] for param in buffer.owners)
    events = Events()
    hooks = _hooks_of(settings, plan, units, reducer, sharing, events)

    def add(unit: Unit, params: Sequence[nn.Parameter], groups: Mapping[int, int]) -> None:
        whole = any(param is params[0] for param in unit.whole)
        for spec in plan_buffers(unit, params, policy, groups, homes, whole=whole):
            states.add(unit, spec, synchronize=False)

    unfreezing = Unfreezing(model, waiting, add, units, reducer, hooks, optimizer, names, _fixes(inner))
    made = accumulation, reducer, hooks, optimizer, unfreezing, names, events
    return EngineParts(plan, mesh, device, policy.dtype, units, *made)


def _place_rest(
    settings: Config, mesh: Mesh, model: nn.Module, dtype: torch.dtype | None, device: torch.device
) -> None:
    """What of the model lies in no flat buffer. Collective."""
    for param in model.parameters():
        if home_of(param) is None and not is_packed(param):
            param.data = param.data.to(device)
    if mesh.is_given and mesh.shape.tensor > 1:
        warn_of_differences(model, mesh)
    if any(True for _ in model.buffers()):
        set_buffer_dtypes(model, settings.data_types, dtype)
        place_buffers(model, mesh.replicas, device)


def _hooks_of(
    settings: Config, plan: StatePlan, units: list[Unit], reducer: Reducer, sharing: Sharing, events: Events
) -> UnitHooks:
    zero, shards = settings.zero_optimization, plan.shards_parameters
    prefetch = Prefetch(zero.stage3_prefetch_bucket_size > 0, zero.stage3_max_live_parameters)
    return UnitHooks(
        units, reducer, prefetch, needs_scale=plan.scales_loss, sharing=sharing, shards=shards, events=events
    )


def _fixes(inner: Optimizer | None) -> str:
    """Why with ``inner`` the same parameters have to train all the time, if so."""
    if not isinstance(inner, OneBitOptimizer):
        return ""
    return (
        f"{type(inner).__name__} sends what it has averaged in its first steps as one bit, so all parameters have to "
        'train from the first step to the last; use AdamW, with "ds_hf": {"wire": {"gradients": 8}} at stage 1 for '
        "little communication"
    )


def _prepare(
    settings: Config, plan: StatePlan, mesh: Mesh, model: nn.Module, inner: Optimizer | None, device: torch.device
) -> tuple[dict[int, int], dict[int, int]]:
    """Check and mark the model; the groups of parameters, see ``_groups_by_parameter``."""
    leaf = settings.zero_optimization.leaf_module
    mark_leaves(model, leaf.classes, leaf.names, leaf.name_suffixes)
    _refuse_meta(model)
    groups = _groups_by_parameter(model, inner)
    check_packed(model, sharded=plan.shards_parameters)
    tell_common_memory(model)
    tell_lost_format(model)
    if mesh.is_given and mesh.shape.tensor > 1:
        mark_cuts(model, mesh)
    move_packed(model, device, sharded=plan.shards_parameters)
    if plan.autocast is not None or any(hasattr(param, COMM_DTYPE) for param in model.parameters()):
        mark_comm_dtypes(model, plan.narrow_modules, plan.autocast)
    return groups


def _unit_policy(settings: Config, plan: StatePlan) -> UnitPolicy:
    most = settings.zero_optimization.stage3_max_live_parameters
    return UnitPolicy(
        sharded=plan.shards_parameters,
        whole_below=plan.whole_below,
        whole_in_all=plan.whole_in_all,
        joins=plan.joins_blocks,
        max_live=most if plan.shards_parameters else None,
        dtype=_torch_dtype(plan.parameters.dtype),
        sent=_torch_dtype(plan.communication_dtype),
    )


def _torch_dtype(name: str | None) -> torch.dtype | None:
    return getattr(torch, name) if name else None


# -- what buffers are made of -------------------------------------------------------------------------------------


@dataclass
class _Links:
    """How the buffers of one engine communicate.

    Attributes:
        gathers, reductions: the streams on which they do.
        peers: ranks that read each other's memory, if large buffers shall go that way.
        sums: of gradients by copies between them, made when the first buffer wants it.
        near: neighbours that add up gradients in few bits first, and the processes with the same place among theirs.
    """

    gathers: CommStream
    reductions: CommStream
    peers: Peers | None
    sums: PeerSums | None = None
    near: tuple[Axis, Axis] | None = None

    def peers_along(self, axis: Axis) -> Peers | None:
        """Those that are all of ``axis``: of experts fewer processes hold the same."""
        return self.peers if self.peers is not None and self.peers.axis == axis else None


def _links(
    settings: Config, plan: StatePlan, mesh: Mesh, device: torch.device, planned: dict[Unit, list[BufferSpec]]
) -> _Links:
    axis, dtype = mesh.replicas, _torch_dtype(plan.parameters.dtype)
    gathers, reductions = CommStream(device), CommStream(device if axis.world_size > 1 else None)
    gathers_some = plan.shards_optimizer or plan.shards_parameters
    large = any(_worth_copying(unit.params, dtype) for unit in planned if not unit.joined)
    # Ranks that meet in memory beside the collectives of a parallel model could wait for each other in a circle.
    copies = settings.ds_hf.peer_copies and gathers_some and large and axis == mesh.world and plan.inner is None
    if plan.parameters.bits or plan.gradients.bits:  # what is to be packed goes through collectives
        return _Links(gathers, reductions, None, near=_near(plan, mesh) if plan.gradients.bits else None)
    return _Links(gathers, reductions, open_peers(axis, device, gathers) if copies else None)


def _near(plan: StatePlan, mesh: Mesh) -> tuple[Axis, Axis] | None:
    """Of a sum in two hops; ``None`` for one. Collective."""
    replicas, size = mesh.replicas.world_size, plan.first_hop
    if size == "auto":
        here = (known_processes() or 0) // mesh.shape.tensor
        size = here if here and replicas % here == 0 and not mesh.is_given else 1
    if replicas % int(size):
        sizes = ", ".join(str(each) for each in range(1, replicas + 1) if replicas % each == 0)
        message = (
            f"gradients are to be summed over groups of {size} processes first, which does not divide the {replicas} "
            "that hold the same parameters"
        )
        raise ConfigError([Fault("/ds_hf/wire/first_hop", message, f"give one of {sizes}")])
    if size in (1, replicas):
        return None
    try:
        return mesh.neighbours(int(size))
    except ValueError as error:
        raise ConfigError([Fault("/ds_hf/wire/first_hop", str(error), "give 1")]) from None


@dataclass
class _States:
    """The states of one engine, buffer after buffer.

    Attributes:
        split: masters that the device updates may be kept as the parameter and the low bits beside it.
        masters: of each buffer that trains.
        low_bits: of those that are split.
        gradients: of the buffers that train, by unit.
        groups: for each of them, the parameter group of each of its parameters.
        reduces: see ``GradientBuffer``.
    """

    settings: Config
    plan: StatePlan
    device: torch.device
    offload: Offload
    split: bool
    links: _Links
    masters: dict[FlatBuffer, Tensor] = field(default_factory=dict)
    low_bits: dict[FlatBuffer, Tensor] = field(default_factory=dict)
    gradients: dict[Unit, list[GradientBuffer]] = field(default_factory=dict)
    groups: dict[GradientBuffer, list[int]] = field(default_factory=dict)
    reduces: Callable[[], bool] | None = None

    def add(self, unit: Unit, spec: BufferSpec, *, synchronize: bool = True) -> None:
        """Make one more buffer of ``unit``, take the parameters' values over, and make what trains it. Collective.

        Args:
            synchronize: take rank 0's values on all ranks.
        """
        label = spec.label or unit.label or "the model's root"
        buffer = self._make_buffer(spec, f"{unit.name or 'root'}.{len(unit.buffers)}", label)
        buffer.labels = Labels.of(label)
        buffer.comm_stream = self.links.gathers
        buffer.hold.reports_changes = self.settings.zero_optimization.enable_sanity_checks
        buffer.hold.looks = 6  # a forward and a backward of three steps
        buffer.kept_whole = self.plan.shards_parameters and not buffer.sharded
        staged = buffer.adopt(synchronize=synchronize)
        unit.buffers.append(buffer)
        buffer.frozen = not spec.trains
        if not spec.trains:
            return
        self.masters[buffer], low = _make_master(buffer, staged, self.plan, self.offload.store, splits=self.split)
        if low is not None:
            self.low_bits[buffer] = low
        gradient = self._make_gradient(buffer, spec)
        self.gradients.setdefault(unit, []).append(gradient)
        self.groups[gradient] = list(spec.groups)

    def _make_buffer(self, spec: BufferSpec, name: str, label: str) -> FlatBuffer:
        assert spec.replicas is not None
        inside = spec.replicas.over(self.plan.parameters.over)
        # What no optimizer updates has no states that could be divided otherwise.
        axis = spec.replicas.over(self.plan.optimizer.over) if spec.trains else inside
        storage = self.offload.shard_storage(name, spec.numel // inside.world_size, sharded=spec.sharded or spec.packed)
        if spec.packed:
            return PackedBuffer(spec.params, axis, device=self.device, shard_storage=storage, replicas=spec.replicas)
        form = self._form(self.plan.parameters.bits) if spec.sharded and inside.world_size > 1 else None
        over = axis if storage is None else inside
        gathering = Gathering(over)
        if form is not None and storage is not None:
            gathering = RoundedGathering(over, form, storage.fetch, inside)
        if storage is not None and axis != inside:
            storage = SecondShard(
                storage, axis, inside, device=self.device, comm_stream=self.links.gathers, label=label, form=form
            )
            if form is not None:
                gathering = RoundedGathering(over, None, storage.fetch_first, axis)
        gathered = spec.sharded or (spec.trains and self.plan.shards_optimizer)
        copied = gathered and not spec.spares_host and _worth_copying(spec.params, spec.dtype)
        peers = self.links.peers_along(over)
        if copied and not gathering.rounds and peers is not None and not (storage and storage.apart):
            gathering = CopiedGathering(over, peers)
        return FlatBuffer(
            spec.params,
            axis,
            dtype=spec.dtype,
            device=self.device,
            sharded=storage is not None,
            shard_storage=storage,
            replicas=spec.replicas,
            gathering=gathering,
        )

    def _form(self, bits: int | None) -> BlockFormat | None:
        return None if bits is None else BlockFormat(bits, self.plan.block)

    def _make_gradient(self, buffer: FlatBuffer, spec: BufferSpec) -> GradientBuffer:
        assert spec.replicas is not None
        policy, links = _gradient_policy(self.settings, self.plan, spec.replicas.divisor), self.links
        sums = None
        peers = links.peers_along(buffer.axis)
        if peers is not None and not spec.spares_host and summed_by_copies(buffer, policy):
            sums = links.sums = links.sums or peers.sums()
        storage = self.offload.store.gradient_storage(buffer)
        return GradientBuffer(buffer, policy, links.reductions, storage, sums, self._block_sums(buffer), self.reduces)

    def _block_sums(self, buffer: FlatBuffer) -> BlockSums | None:
        form = self._form(self.plan.gradients.bits)
        if form is None or buffer.axis.world_size == 1:
            return None
        near = self.links.near
        if near is not None and near[0].world_size * near[1].world_size != buffer.axis.world_size:
            near = None  # parameters that other processes hold too
        feedback = None if self.plan.loco is None else Feedback(*self.plan.loco)
        return BlockSums(buffer.axis, form, near, feedback)


def _worth_copying(params: Sequence[nn.Parameter], dtype: torch.dtype | None) -> bool:
    """Whether the other ranks' parts of these values are fetched by copies, where that is possible."""
    # Masters may be fp32 parameters themselves, and be written to by others than ``owned``.
    narrow = [param for param in params if (dtype or own_dtype(param)).itemsize <= 2]
    nbytes = sum(logical_shape(param).numel() * (dtype or own_dtype(param)).itemsize for param in narrow)
    return bool(narrow) and nbytes >= peer_memory.LEAST_COPIED_NBYTES


def _splits_masters(settings: Config, plan: StatePlan, device: torch.device, inner: Optimizer | None) -> bool:
    """Whether of fp32 masters beside bf16 parameters only the half is kept that those lack."""
    if not plan.may_split_masters or inner is None or isinstance(inner, TensorwiseOptimizer):
        return False
    by_kernels = device.type == "cuda" and library.choose(device)[1] is None
    return streamed_update(inner) is not None and (by_kernels or settings.ds_hf.split_masters is True)


def _make_master(
    buffer: FlatBuffer, staged: Tensor, plan: StatePlan, store: StateStore, *, splits: bool
) -> tuple[Tensor, Tensor | None]:
    """Master weights over what the rank owns: the parameters' own storage where dtype and device allow it. Where
    masters may be split and are, both parts."""
    whole = not plan.shards_optimizer
    owned = buffer.owned(whole=whole, write=False)
    assert plan.optimizer.dtype is not None
    target = getattr(torch, plan.optimizer.dtype) if owned.dtype in (torch.float16, torch.bfloat16) else owned.dtype
    low, high = (0, buffer.layout.numel) if whole else buffer.layout.shard_range(buffer.axis.rank)
    exact = staged[low:high]
    if (
        splits
        and store.takes_split_masters
        and buffer.stays
        and owned.dtype is torch.bfloat16
        and target is torch.float32
    ):
        master = store.place(buffer, owned, exact, owned.dtype)
        missing = store.place_low_bits(buffer)
        if not buffer.sharded:
            write_split(staged, buffer.full)  # the other ranks' parts too: ties are rounded as the updates will
        write_split(exact, buffer.owned(whole=whole), missing)
        if buffer.sharded:
            buffer.refresh()
        return master, missing
    return store.place(buffer, owned, exact, target), None


def _gradient_policy(settings: Config, plan: StatePlan, divisor: int) -> GradientPolicy:
    """How gradients travel that are divided by ``divisor``, the number of processes whose losses are averaged."""
    mean = settings.gradient_allreduce_op == "mean"
    # All of the division before the sum, as fp16 needs it, unless the user splits it by gradient_predivide_factor.
    factor = settings.gradient_predivide_factor
    split = mean and not settings.prescale_gradients and factor != 1.0
    before = 1.0 / factor if split else 1.0 / divisor if mean else 1.0
    after = factor / divisor if split else 1.0
    return GradientPolicy(
        whole=not plan.shards_optimizer,
        every_micro_batch=plan.reduces_every_micro_batch,
        scale_before=before,
        scale_after=after,
        communication_dtype=getattr(torch, plan.communication_dtype) if plan.communication_dtype else None,
        accumulation_dtype=accumulation_dtype(plan),
    )


# -- the optimizer ------------------------------------------------------------------------------------------------


def _make_optimizer(
    settings: Config,
    plan: StatePlan,
    mesh: Mesh,
    inner: Optimizer,
    states: _States,
    reducer: Reducer,
    names: dict[int, str],
    optimizer_type: type[ShardedOptimizer],
) -> ShardedOptimizer:
    store = states.offload.store
    policy = _policy(settings, plan, mesh, store, inner)
    steps = BatchSizes.of(settings).accumulation_steps
    nonfinite = NonFinite(nonfinite_mode(settings), mesh.world, whole=policy.whole, names=names, accumulation=steps)
    scaler = build_loss_scaler(settings, sharded=plan.shards_optimizer, autocast=plan.autocast)
    optimizer = optimizer_type(
        inner, states.groups, reducer, scaler, mesh, policy, states.masters, store, nonfinite, states.low_bits
    )
    if settings.ds_hf.split_masters is True and states.masters and not optimizer.low_bits:
        warn_once(
            "ds_hf.split_masters has no effect: it is for bf16 parameters on the device with fp32 masters that the "
            'device updates, and for AdamW, Adam, Lion, Adagrad and SGD; "auto" uses it where it can'
        )
    return optimizer


def _connect(inner: OneBitOptimizer, settings: Config, plan: StatePlan, mesh: Mesh) -> Callable[[], bool]:
    """Give a 1-bit optimizer the processes over which it averages momenta; whether it wants averaged gradients.

    Raises:
        ConfigError: the states that it sends are divided, or the processes do not hold the same.
    """
    name, shape = type(inner).__name__, mesh.shape
    if plan.shards_optimizer:
        message = (
            f"{name} is for ZeRO stage 0: where states are divided, weights travel after each step too, and a bit a "
            "momentum saves less than half"
        )
        fix = 'set "stage": 0, or keep the stage with AdamW and "ds_hf": {"wire": {"gradients": 8}}'
        raise ConfigError([Fault("/zero_optimization/stage", message, fix)])
    if shape.tensor > 1 or shape.pipe > 1 or shape.expert > 1:
        message = (
            f"{name} averages momenta over processes that hold the same parameters, and here processes hold parts of "
            "layers, other layers or other experts"
        )
        fix = 'use AdamW with "stage": 1 and "ds_hf": {"wire": {"gradients": 8}}'
        raise ConfigError([Fault("/optimizer/type", message, fix)])
    if settings.gradient_allreduce_op == "sum":
        message, fix = f"{name} averages momenta", 'use "mean" and scale the learning rate'
        raise ConfigError([Fault("/gradient_allreduce_op", message, fix)])
    inner.connect(mesh.replicas)
    return lambda: inner.reduces


def _policy(settings: Config, plan: StatePlan, mesh: Mesh, store: StateStore, inner: Optimizer) -> OptimizerPolicy:
    elementwise = is_elementwise(inner)
    cut = any(is_cut(param) for group in inner.param_groups for param in group["params"])
    by_matrix = _takes_experts(inner, mesh)
    if cut and not by_matrix:
        _refuse_whole_rules(inner, mesh)
    knows_pieces = elementwise or isinstance(inner, TensorwiseOptimizer)
    if not knows_pieces and ((plan.shards_optimizer and mesh.replicas.world_size > 1) or cut):
        if isinstance(inner, getattr(torch.optim, "Muon", ())):
            raise ConfigError(
                "torch.optim.Muon takes whole matrices, and divided states give it pieces: name it in the file, "
                '"optimizer": {"type": "Muon"}, which knows them, or use ZeRO stage 0',
                "initialize(optimizer=...)",
            )
        warn_once(
            f"{type(inner).__name__} may look at whole tensors, but {'divided layers or experts' if cut else 'shards'} "
            "give it pieces: its result depends on the number of processes" + ("" if cut else "; stage 0 gives it all")
        )
    return OptimizerPolicy(
        whole=not plan.shards_optimizer,
        device=store.device,
        max_norm=float(settings.gradient_clipping or 0.0),
        check_overflow=nonfinite_mode(settings) == "skip",
        elementwise=elementwise,
        moments=getattr(torch, plan.moments),
        stochastic=settings.ds_hf.stochastic_rounding,
        alike=mesh.shape.expert == 1,
        cut_over=mesh.world if cut and isinstance(inner, TensorwiseOptimizer) and not by_matrix else None,
    )


def _takes_experts(inner: Optimizer, mesh: Mesh) -> bool:
    """Whether it is Muon, to which each expert's matrix is one by itself, and processes have whole ones."""
    if not isinstance(inner, MuonWithAuxAdam) or mesh.shape.tensor > 1 or mesh.is_given:
        return False
    matrices = (param for group in inner.param_groups if group["use_muon"] for param in group["params"])
    return all(len(logical_shape(param)) > 2 for param in matrices if is_cut(param))


_WHOLE_RULES = ("Muon", "Adafactor", "Shampoo", "SOAP", "GaLore", "CAME", "LBFGS")  # of these and other libraries


def _refuse_whole_rules(inner: Optimizer, mesh: Mesh) -> None:
    """LAMB's norms can be summed over processes; what looks at rows, columns or the whole of a matrix cannot. An author
    who has divided the model (``mpu=``) may give such an optimizer of their own."""
    name = type(inner).__name__
    named = any(each.lower() in name.lower() for each in _WHOLE_RULES)
    if not (isinstance(inner, TensorwiseOptimizer) if mesh.is_given else named):
        return
    whose = "expert" if mesh.shape.expert > 1 else "tensor"
    whose = "model-parallel processes of the mpu" if mesh.is_given else f"{whose}-parallel processes"
    raise ConfigError(
        f"{name} looks at whole parameters, of which the {whose} hold parts: use AdamW, Adam, Lion, Adagrad"
        f"{' or SGD' if mesh.is_given else ', SGD or LAMB'}",
        "initialize(mpu=...)" if mesh.is_given else "optimizer",
    )


# -- the model ----------------------------------------------------------------------------------------------------


def _parameter_names(model: nn.Module) -> dict[int, str]:
    """By ``id``, in the order of the model, those of the parts of quantized parameters too."""
    names: dict[int, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        for path, part in packed_parts(param):
            names.setdefault(id(part), f"{name}.{path}" if path else name)
        names.setdefault(id(param), name)
    return names


def _managed(model: nn.Module, plan: StatePlan) -> list[nn.Parameter]:
    """The parameters that lie in flat buffers: packed ones only where that shards them."""
    params = model.parameters()
    return [p for p in params if not is_packed(p) or (plan.shards_parameters and shards_packed(p))]


def _groups_by_parameter(model: nn.Module, inner: Optimizer | None) -> tuple[dict[int, int], dict[int, int]]:
    """Index of the parameter group of each of the model's parameters that the optimizer updates, and of each that it
    could update if that were not frozen, by ``id``."""
    found: dict[int, int] = {}
    frozen: dict[int, int] = {}
    if inner is None:
        return found, frozen
    known = {id(p) for p in model.parameters()}
    for index, group in enumerate(inner.param_groups):
        for param in group["params"]:
            if id(param) not in known:
                raise ConfigError(
                    f"parameter group {index} of the optimizer holds a tensor of shape {tuple(param.shape)} that is "
                    "not a parameter of the model; build the optimizer from this model's parameters, and if it is one "
                    "of a loss with weights of its own, give initialize() a module that holds both"
                )
            if param.is_floating_point() and (param.requires_grad or not is_packed(param)):
                (found if param.requires_grad else frozen)[id(param)] = index
    return found, frozen


def _refuse_meta(model: nn.Module) -> None:
    meta = [name for name, param in model.named_parameters() if param.is_meta]
    if meta:
        raise ConfigError(
            f"{len(meta)} parameters are on the meta device and have no values ({meta[0]}, ...): load the "
            "weights first, or build the model under zero.Init"
        )
