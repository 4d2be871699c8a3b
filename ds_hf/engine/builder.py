"""``initialize``: the only place that wires parts of different layers together.

Order: configuration -> process group -> axis -> plan -> units and masters -> optimizer -> engine -> scheduler, data.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ds_hf.config import load_config
from ds_hf.config.mesh import given_claims
from ds_hf.config.plan import StatePlan, nonfinite_mode, plan_states
from ds_hf.config.types import Config
from ds_hf.engine import progress, trial
from ds_hf.engine.accumulation import BatchSizes
from ds_hf.engine.casting import place_buffers, set_buffer_dtypes
from ds_hf.engine.data import build_dataloader
from ds_hf.engine.dist import peers as peer_memory
from ds_hf.engine.dist.comms_logger import comms_logger
from ds_hf.engine.dist.mesh import Axis, Mesh, compute_device, watch_for_hangs
from ds_hf.engine.dist.messages import set_log_level_from_string
from ds_hf.engine.dist.peer_sums import PeerSums
from ds_hf.engine.dist.peers import Peers, open_peers
from ds_hf.engine.dist.process_group import init_distributed
from ds_hf.engine.dist.streams import Lane
from ds_hf.engine.engine import Engine
from ds_hf.engine.given import check_optimizer, check_scheduler
from ds_hf.engine.lr_probe import script as lr_script
from ds_hf.engine.lr_schedules import build_scheduler
from ds_hf.engine.monitor import open_monitors
from ds_hf.engine.offloading import accumulation_dtype, build_offload
from ds_hf.engine.ops import library
from ds_hf.engine.ops.halves import write_halves
from ds_hf.engine.optim.base import TensorwiseOptimizer
from ds_hf.engine.optim.build import build_optimizer
from ds_hf.engine.optim.loss_scaler import build_loss_scaler
from ds_hf.engine.optim.muon_groups import mark_matrices
from ds_hf.engine.optim.nonfinite import NonFinite
from ds_hf.engine.optim.sharded import OptimizerPolicy, ShardedOptimizer
from ds_hf.engine.optim.store import StateStore
from ds_hf.engine.optim.streaming import is_elementwise, streamed_update
from ds_hf.engine.parts import EngineParts
from ds_hf.engine.rehearsal import rehearsal
from ds_hf.engine.zero.advice import whole_model_advice
from ds_hf.engine.zero.buffer import FlatBuffer, home_of, logical_shape
from ds_hf.engine.zero.comm_dtype import mark_comm_dtypes
from ds_hf.engine.zero.cut import is_cut
from ds_hf.engine.zero.gradients import GradientBuffer, GradientPolicy, summed_by_copies
from ds_hf.engine.zero.grouping import FROZEN, by_layout, join_small, keep_small_whole, make_units, own_dtype
from ds_hf.engine.zero.hooks import UnitHooks
from ds_hf.engine.zero.leaf import mark_leaves
from ds_hf.engine.zero.model_parallel import mark_cuts, warn_of_differences
from ds_hf.engine.zero.opaque import (
    OpaqueBuffer,
    check_opaque,
    is_opaque,
    move_opaque,
    opaque_parts,
    shards_opaque,
)
from ds_hf.engine.zero.prefetch import Prefetch
from ds_hf.engine.zero.reduction import Reducer
from ds_hf.engine.zero.replicas import Replicas
from ds_hf.engine.zero.rest import ShardRest
from ds_hf.engine.zero.unit import Unit
from ds_hf.errors import ConfigError
from ds_hf.log import warn_once
from ds_hf.measure.protocol import TRIAL_ENV

__all__ = ["initialize"]


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[Engine, ShardedOptimizer | None, Any, Any]:
    """Make ``model`` train as the configuration says (DeepSpeed's ``initialize``). All ranks call it.

    Args:
        args: object whose ``deepspeed_config`` names the configuration file, when ``config`` is not given.
        model: the model; it stays the same object and is changed in place.
        optimizer: a torch optimizer over the model's parameters, or a function from parameters to one; overrides the
            configuration's.
        model_parameters: parameters or parameter groups for the configuration's optimizer; default all that train.
        training_data: a dataset; the returned loader gives this rank its micro-batches.
        lr_scheduler: a scheduler built on ``optimizer``, or a function from the optimizer to one; the engine steps it.
        mpu: Megatron-style object for a model whose layers its author has divided over processes
            (``get_data_parallel_*``, ``get_model_parallel_*`` or ``get_tensor_model_parallel_*``).
        mesh_param: (data-parallel size, sequence-parallel size); the latter is 1.
        dist_init_required: ``False``: the process group must already exist.
        collate_fn: for ``training_data``.
        config: path, dict, JSON text, base64 or preset name; ``config_params`` is the same, older name.

    Returns:
        engine, optimizer, data loader, scheduler; each but the engine may be ``None``.

    Raises:
        ConfigError: the configuration, or its combination with the arguments, is wrong.
    """
    if model is None or not isinstance(model, nn.Module):
        raise ConfigError(f"initialize() needs model=, an nn.Module; got {type(model).__name__}")
    compiled = type(model).__name__ == "OptimizedModule"
    if compiled:  # torch.compile(model): its graphs would have the hooks inside
        model = cast(nn.Module, model._orig_mod)
    source = _config_source(args, config, config_params)
    init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    if (stand_in := rehearsal()) is not None:
        return stand_in(model=model, optimizer=optimizer, config=source, data=training_data)
    settings, mesh = _load(source, model, mpu, mesh_param)
    if settings.log_level is not None:
        set_log_level_from_string(settings.log_level)
    watch_for_hangs(mesh.replicas, settings.ds_hf.hang_timeout)
    comms_logger.configure(settings.comms_logger)
    plan = plan_states(settings)
    check_scheduler(optimizer, lr_scheduler)
    measured = bool(os.environ.get(TRIAL_ENV) or os.environ.get(lr_script.ENVIRONMENT))
    monitor = open_monitors(settings, mesh.world, silent=measured)
    inner = _make_optimizer(settings, model, optimizer, model_parameters)
    parts = _make_parts(settings, plan, mesh, model, inner)
    engine = Engine(model, source if isinstance(source, dict) else settings.resolved, settings, parts, monitor)
    engine.lr_scheduler = _make_scheduler(settings, inner, lr_scheduler)
    engine.mpu = mpu
    if training_data is not None:
        engine.training_dataloader = build_dataloader(
            training_data,
            batch_size=engine.batch.micro,
            collate_fn=collate_fn,
            drop_last=settings.dataloader_drop_last,
            rank=mesh.sample_rank,
            world_size=mesh.shape.data,
        )
    progress.attach(engine)
    if compiled or settings.ds_hf.compile:
        engine.compile()
    lr_script.attach(engine)
    if request := os.environ.get(TRIAL_ENV):
        trial.attach(engine, request)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _load(source: Any, model: nn.Module, mpu: Any, mesh_param: Any) -> tuple[Config, Mesh]:
    """The configuration and the mesh that it and everything else ask for."""
    topology = getattr(model, "topology", None)
    topology = topology() if callable(topology) else None
    if not hasattr(topology, "get_axis_names"):
        topology = None
    claims = given_claims(mpu=mpu, mesh_param=mesh_param, topology=topology, environ=os.environ)
    processes = dist.get_world_size()
    if mpu is not None and all(claim.size == 1 or claim.axis == "data" for claim in claims):
        processes = dist.get_world_size(mpu.get_data_parallel_group())  # the others may train something else
    settings = load_config(source, world_size=processes, given=claims)
    assert settings.mesh is not None
    Mesh.latest = mesh = Mesh(settings.mesh) if mpu is None else Mesh.given(mpu, settings.mesh)
    return settings, mesh


def _config_source(args: Any, config: Any, config_params: Any) -> Any:
    """The one configuration among the three ways of giving it."""
    named = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)
    if config is not None and config_params is not None:
        raise ConfigError("give config= or config_params=, not both: they are the same argument")
    given = config if config is not None else config_params
    if given is not None and named is not None and given != named:
        raise ConfigError(f"the configuration is given twice: config= and args.deepspeed_config ({named}); drop one")
    if given is None and named is None:
        raise ConfigError("no configuration: give initialize(config=...), or --deepspeed_config on the command line")
    return named if given is None else given


# -- optimizer and scheduler --------------------------------------------------------------------------------------


def _make_optimizer(
    settings: Config, model: nn.Module, optimizer: Any, model_parameters: Iterable[Any] | None
) -> Optimizer | None:
    """The inner optimizer, still over the model's own parameters."""
    if isinstance(optimizer, Optimizer):
        if settings.optimizer is not None:
            warn_once(f"the optimizer given to initialize() replaces the configuration's {settings.optimizer.type!r}")
        check_optimizer(optimizer)
        return optimizer
    if optimizer is None and settings.optimizer is None:
        return None
    groups = _trainable_groups(model, model_parameters)
    if callable(optimizer):
        return optimizer(groups)  # type: ignore[no-any-return]
    if optimizer is not None:
        raise ConfigError(f"optimizer= takes a torch.optim.Optimizer or a function, not {type(optimizer).__name__}")
    assert settings.optimizer is not None
    if settings.optimizer.type.lower() == "muon":
        mark_matrices(model)
    offloaded = settings.zero_optimization.offload_optimizer.device != "none"
    return build_optimizer(settings.optimizer.type, settings.optimizer.params, groups, offloaded=offloaded)


def _trainable_groups(model: nn.Module, model_parameters: Iterable[Any] | None) -> list[Any]:
    """Parameter groups with only parameters that train."""
    given = list(model.parameters() if model_parameters is None else model_parameters)
    if given and isinstance(given[0], dict):
        kept = [{**group, "params": [p for p in _listed(group["params"]) if p.requires_grad]} for group in given]
    else:
        kept = [{"params": [p[1] if isinstance(p, tuple) else p for p in given]}]
        kept[0]["params"] = [p for p in kept[0]["params"] if p.requires_grad]
    kept = [group for group in kept if group["params"]]
    if not kept:
        raise ConfigError("no parameter requires a gradient: there is nothing to optimize")
    return kept


def _listed(params: Any) -> list[Tensor]:
    return [params] if isinstance(params, Tensor) else list(params)


def _make_scheduler(settings: Config, inner: Optimizer | None, given: Any) -> Any:
    """The scheduler that the engine steps: the argument before the configuration's."""
    if given is not None:
        return given(inner) if callable(given) and not hasattr(given, "step") else given
    if settings.scheduler is None or settings.scheduler.type is None or inner is None:
        return None
    return build_scheduler(
        settings.scheduler.type, settings.scheduler.params, inner, mode=settings.ds_hf.compat_schedules
    )


# -- model states -------------------------------------------------------------------------------------------------


def _make_parts(
    settings: Config, plan: StatePlan, mesh: Mesh, model: nn.Module, inner: Optimizer | None
) -> EngineParts:
    device, axis = compute_device(), mesh.replicas
    leaf = settings.zero_optimization.leaf_module
    mark_leaves(model, leaf.classes, leaf.names, leaf.name_suffixes)
    _refuse_meta(model)
    if plan.shards_parameters and (advice := whole_model_advice(model.parameters(), axis.world_size)):
        warn_once(advice)
    dtype = getattr(torch, plan.parameters.dtype) if plan.parameters.dtype else None
    group_of = _groups_by_parameter(model, inner)
    check_opaque(model, sharded=plan.shards_parameters)
    mark_cuts(model, mesh)
    move_opaque(model, device)
    mark_comm_dtypes(model, plan.narrow_modules, plan.autocast)
    units = make_units(model, _managed(model, plan))
    if plan.joins_blocks:
        most = settings.zero_optimization.stage3_max_live_parameters if plan.shards_parameters else None
        units = join_small(units, dtype, most)
    if plan.shards_parameters:
        units = keep_small_whole(units, plan.whole_below, plan.whole_in_all)
    in_halves = _keeps_halves(settings, plan, device, inner)
    offload = build_offload(settings, plan, mesh, device, _managed(model, plan), inner, in_halves=in_halves)
    masters: dict[FlatBuffer, Tensor] = {}
    lows: dict[FlatBuffer, Tensor] = {}
    gradients: dict[Unit, list[GradientBuffer]] = {}
    groups: dict[GradientBuffer, list[int]] = {}
    sent = getattr(torch, plan.communication_dtype) if plan.communication_dtype else None
    gathers, reductions = Lane(device), Lane(device if axis.world_size > 1 else None)
    gathers_some = plan.shards_optimizer or plan.shards_parameters
    large = any(_worth_copying(unit.params, dtype) for unit in units if not unit.joined)
    # Ranks that meet in memory beside the collectives of a parallel model could wait for each other in a circle.
    copies = settings.ds_hf.peer_copies and gathers_some and large and axis == mesh.world
    peers = open_peers(axis, device, gathers) if copies else None
    sums: PeerSums | None = None
    for unit in units:
        kinds = (unit.params, unit.whole)
        layouts = [each for params in kinds for each in by_layout(params, group_of, dtype, sent, mesh)]
        for replicas, params in layouts:
            gradient_policy = _gradient_policy(settings, plan, replicas.divisor)
            sharded = plan.shards_parameters and not any(params[0] is p for p in unit.whole)
            numel = sum(logical_shape(p).numel() for p in params) // replicas.axis.world_size
            name = f"{unit.name or 'root'}.{len(unit.buffers)}"
            rest = offload.rest(name, numel, sharded=sharded or is_opaque(params[0]))
            trains = group_of.get(id(params[0]), FROZEN) != FROZEN
            copied = (sharded or (trains and plan.shards_optimizer)) and _worth_copying(params, dtype)
            copied = copied and not unit.joined  # those are there to spare the host
            buffer = _make_buffer(params, replicas, dtype, device, rest, peers if copied else None)
            buffer.name_for_logs(unit.label or "the model's root")
            buffer.lane = gathers
            buffer.reports_changes = settings.zero_optimization.enable_sanity_checks
            buffer.kept_whole = plan.shards_parameters and not buffer.sharded
            staged = buffer.adopt()
            unit.buffers.append(buffer)
            if trains:
                buffer.frozen = False
                masters[buffer], low = _make_master(buffer, staged, plan, offload.store, in_halves=in_halves)
                if low is not None:
                    lows[buffer] = low
                by_copies = peers is not None and not unit.joined and summed_by_copies(buffer, gradient_policy)
                if peers is not None and by_copies:
                    sums = sums or peers.sums()
                home = offload.store.home(buffer)
                gradient = GradientBuffer(buffer, gradient_policy, reductions, home, sums if by_copies else None)
                gradients.setdefault(unit, []).append(gradient)
                groups[gradient] = [group_of[id(p)] for p in params]
            else:
                buffer.frozen = True
            del staged
    for param in model.parameters():
        if home_of(param) is None and not is_opaque(param):
            param.data = param.data.to(device)
    warn_of_differences(model, mesh)
    set_buffer_dtypes(model, settings.data_types, dtype)
    place_buffers(model, axis, device)
    waits = device.type == "cpu" and not plan.shards_optimizer
    reducer = Reducer(units, gradients, plan.reduces_every_micro_batch, at_the_end=waits, world=mesh.world)
    optimizer = None
    names = _parameter_names(model)
    if inner is not None:
        policy = _policy(settings, plan, axis, offload.store, inner)
        steps = BatchSizes.of(settings).accumulation_steps
        nonfinite = NonFinite(nonfinite_mode(settings), mesh.world, whole=policy.whole, names=names, accumulation=steps)
        scaler = build_loss_scaler(settings, sharded=plan.shards_optimizer, autocast=plan.autocast)
        optimizer = ShardedOptimizer(
            inner, groups, reducer, scaler, mesh, policy, masters, offload.store, nonfinite, lows
        )
        if settings.ds_hf.split_masters is True and masters and not optimizer.lows:
            warn_once(
                "ds_hf.split_masters has no effect: it is for bf16 parameters on the device with fp32 masters that the "
                'device updates, and for AdamW, Adam, Lion, Adagrad and SGD; "auto" uses it where it can'
            )
    for unit in units:
        for buffer in unit.buffers:
            buffer.count_users()
    zero = settings.zero_optimization
    prefetch = Prefetch(zero.stage3_prefetch_bucket_size > 0, zero.stage3_max_live_parameters)
    return EngineParts(plan, mesh, device, dtype, units, reducer, UnitHooks(units, reducer, prefetch), optimizer, names)


def _parameter_names(model: nn.Module) -> dict[int, str]:
    """By ``id``, in the order of the model, those of the parts of quantized parameters too."""
    names: dict[int, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        for path, part in opaque_parts(param):
            names.setdefault(id(part), f"{name}.{path}" if path else name)
        names.setdefault(id(param), name)
    return names


def _managed(model: nn.Module, plan: StatePlan) -> list[nn.Parameter]:
    """The parameters that lie in flat buffers: opaque ones only where that shards them."""
    params = model.parameters()
    return [p for p in params if not is_opaque(p) or (plan.shards_parameters and shards_opaque(p))]


def _groups_by_parameter(model: nn.Module, inner: Optimizer | None) -> dict[int, int]:
    """Index of the parameter group of each of the model's parameters that the optimizer updates."""
    if inner is None:
        return {}
    known = {id(p) for p in model.parameters()}
    found: dict[int, int] = {}
    for index, group in enumerate(inner.param_groups):
        for param in group["params"]:
            if id(param) not in known:
                raise ConfigError(
                    f"parameter group {index} of the optimizer holds a tensor of shape {tuple(param.shape)} that is "
                    "not a parameter of the model; build the optimizer from this model's parameters"
                )
            if param.requires_grad and param.is_floating_point():
                found[id(param)] = index
    return found


def _make_buffer(
    params: list[nn.Parameter],
    replicas: Replicas,
    dtype: torch.dtype | None,
    device: torch.device,
    rest: ShardRest | None,
    peers: Peers | None,
) -> FlatBuffer:
    axis = replicas.axis
    if is_opaque(params[0]):
        return OpaqueBuffer(params, axis, device=device, rest=rest)
    own, sharded = dtype or own_dtype(params[0]), rest is not None
    return FlatBuffer(
        params, axis, dtype=own, device=device, sharded=sharded, rest=rest, peers=peers, replicas=replicas
    )


def _worth_copying(params: Sequence[nn.Parameter], dtype: torch.dtype | None) -> bool:
    """Whether the other ranks' parts of these values are fetched by copies, where that is possible."""
    # Masters may be fp32 parameters themselves, and be written to by others than ``owned``.
    narrow = [param for param in params if (dtype or own_dtype(param)).itemsize <= 2]
    nbytes = sum(logical_shape(param).numel() * (dtype or own_dtype(param)).itemsize for param in narrow)
    return bool(narrow) and nbytes >= peer_memory.LEAST_COPIED_NBYTES


def _keeps_halves(settings: Config, plan: StatePlan, device: torch.device, inner: Optimizer | None) -> bool:
    """Whether of fp32 masters beside bf16 parameters only the half is kept that those lack."""
    if not plan.may_split_masters or inner is None or isinstance(inner, TensorwiseOptimizer):
        return False
    by_kernels = device.type == "cuda" and library.choose(device)[1] is None
    return streamed_update(inner) is not None and (by_kernels or settings.ds_hf.split_masters is True)


def _make_master(
    buffer: FlatBuffer, staged: Tensor, plan: StatePlan, store: StateStore, *, in_halves: bool
) -> tuple[Tensor, Tensor | None]:
    """Master weights over what the rank owns: the parameters' own storage where dtype and device allow it. Where
    masters may be kept in halves and are that, both halves."""
    whole = not plan.shards_optimizer
    owned = buffer.owned(whole=whole, write=False)
    assert plan.optimizer.dtype is not None
    target = getattr(torch, plan.optimizer.dtype) if owned.dtype in (torch.float16, torch.bfloat16) else owned.dtype
    low, high = (0, buffer.layout.numel) if whole else buffer.layout.shard_range(buffer.axis.rank)
    exact = staged[low:high]
    if in_halves and store.takes_halves and buffer.stays and owned.dtype is torch.bfloat16 and target is torch.float32:
        master = store.place(buffer, owned, exact, owned.dtype)
        missing = store.place_low(buffer)
        if not buffer.sharded:
            write_halves(staged, buffer.full)  # the other ranks' parts too: ties are rounded as the updates will
        write_halves(exact, buffer.owned(whole=whole), missing)
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


def _policy(settings: Config, plan: StatePlan, axis: Axis, store: StateStore, inner: Optimizer) -> OptimizerPolicy:
    elementwise = is_elementwise(inner)
    if isinstance(inner, TensorwiseOptimizer) and any(is_cut(p) for g in inner.param_groups for p in g["params"]):
        raise ConfigError(
            f"{type(inner).__name__} looks at whole parameters, of which the model-parallel processes of the mpu hold "
            "parts: use AdamW, Adam, Lion, Adagrad or SGD",
            "initialize(mpu=...)",
        )
    knows_pieces = elementwise or isinstance(inner, TensorwiseOptimizer)
    if not knows_pieces and plan.shards_optimizer and axis.world_size > 1:
        warn_once(
            f"{type(inner).__name__} may look at whole tensors, but sharded optimizer states give it pieces of them: "
            "its result depends on the number of processes; ZeRO stage 0 gives it whole tensors"
        )
    return OptimizerPolicy(
        whole=not plan.shards_optimizer,
        device=store.device,
        max_norm=float(settings.gradient_clipping or 0.0),
        check_overflow=nonfinite_mode(settings) == "skip",
        elementwise=elementwise,
        moments=getattr(torch, plan.moments),
        stochastic=settings.ds_hf.stochastic_rounding,
    )


def _refuse_meta(model: nn.Module) -> None:
    meta = [name for name, param in model.named_parameters() if param.is_meta]
    if meta:
        raise ConfigError(
            f"{len(meta)} parameters are on the meta device and have no values ({meta[0]}, ...): load the "
            "weights first, or build the model under zero.Init"
        )
