"""One forward and backward of a model on the meta device, as a timeline of live bytes and of what its units do.

The engine's own hooks and reducer run; only the buffers they drive are stand-ins that note gather, release, collect and
reduce. So the timeline follows the engine in every detail (checkpointing, shared weights, unused parameters) and holds
for any number of processes: what the noted events cost is priced by ``pricing``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ds_hf.engine.comm.mesh import Axis
from ds_hf.engine.modules.adapters import FusedAdapters
from ds_hf.engine.modules.compiling import blocks_of
from ds_hf.engine.modules.tiling.models import ChunkedLoss, PartialLoss, TiledMlps
from ds_hf.engine.ops.triton_launches import launching_nothing
from ds_hf.engine.zero.buffer import BufferState, FlatBuffer
from ds_hf.engine.zero.cut import is_cut
from ds_hf.engine.zero.gradients import GradientBuffer, GradientPolicy
from ds_hf.engine.zero.hooks import UnitHooks
from ds_hf.engine.zero.packed import is_packed
from ds_hf.engine.zero.planning import BufferSpec, UnitPolicy, plan_units
from ds_hf.engine.zero.reduction import Reducer
from ds_hf.engine.zero.replicas import Replicas, expert_processes, is_tied_over_stages
from ds_hf.engine.zero.unit import Prefetch, Unit
from ds_hf.memory.compiled import CompiledBlocks
from ds_hf.memory.kernels import AsOnCuda, autocast_of_meta
from ds_hf.memory.offloaded import offload_of
from ds_hf.memory.tracker import Kind, LiveTensors

__all__ = ["SOURCE", "Event", "Sharding", "Step", "Timeline", "between", "record"]

_META = torch.device("meta")
_ALONE = Axis(None, 0, 1)
_WHOLE, _CUT = Replicas(_ALONE, 1), Replicas(_ALONE, 2)  # of cut parameters fewer processes are replicas: apart
_TIED = Replicas(_ALONE, 1, tied="tied")  # of those that two stages of a pipeline hold more
_POLICY = GradientPolicy(
    whole=False,
    every_micro_batch=True,
    scale_before=1.0,
    scale_after=1.0,
    communication_dtype=None,
    accumulation_dtype=torch.float32,
)


class Event(Enum):
    """What happened to a buffer."""

    START = "start"
    GATHER = "gather"
    RELEASE = "release"
    COLLECT = "collect"  # gradients into the flat buffer
    REDUCE = "reduce"
    BACKWARD = "backward"  # begins; of no buffer


SOURCE = "_ds_source_itemsize"  # of a parameter that was cast since


@dataclass(frozen=True)
class Sharding:
    """What of a plan changes the timeline.

    Attributes:
        parameters: units are gathered and released.
        whole_below, whole_in_all: see ``StatePlan``.
        prefetch, max_live: see ``Prefetch``.
        joins: small blocks are joined (``planning.join_small``).
        offloads: inputs of checkpointed blocks go to host memory (``engine.activations``).
        tiled_mlp, chunked_loss: as in the configuration (``engine.tiling``).
        gathers_logits: of a head that is cut (``vocab_parallel_lm_head: false``).
        compiled: blocks are compiled, under ``budget`` (``ds_hf.activation_memory_budget``).
        fuses_adapters: adapters are computed together (``ds_hf.fused_lora``).
    """

    parameters: bool
    whole_below: int = 0
    whole_in_all: int = 0
    prefetch: bool = True
    max_live: int | None = None
    joins: bool = False
    offloads: bool = False
    tiled_mlp: int | Literal["auto"] | None = None
    chunked_loss: bool = False
    gathers_logits: bool = False
    compiled: bool = False
    budget: float | None = None
    fuses_adapters: bool = False

    @property
    def units(self) -> UnitPolicy:
        """What decides the units."""
        return UnitPolicy(self.parameters, self.whole_below, self.whole_in_all, self.joins, self.max_live)


@dataclass
class Step:
    """An event, and the most that is live between it and the next: bytes by ``Kind``, and scratch of a kernel.

    Attributes:
        before: what is live at the event itself.
    """

    event: Event
    buffer: int
    before: tuple[int, ...]
    peak: tuple[int, ...]
    scratch: int = 0


@dataclass
class Timeline:
    """Attributes:
    buffers: flat buffers, in the engine's order. sources: bytes an element of each, as the model was loaded.
    constants: bytes of the model's buffers (``nn.Module.register_buffer``).
    steps: in time.
    activations_on_host: bytes of host memory for inputs of checkpointed blocks.
    """

    buffers: list[BufferSpec]
    constants: int
    steps: list[Step] = field(default_factory=list)
    activations_on_host: int = 0
    sources: list[int] = field(default_factory=list)

    @property
    def loaded(self) -> list[tuple[BufferSpec, int]]:
        """Each buffer with the bytes of an element as it was loaded."""
        return list(zip(self.buffers, self.sources or [spec.itemsize for spec in self.buffers], strict=True))

    @property
    def kept(self) -> int:
        """Bytes that live from forward to backward."""
        return next(sum(step.before) for step in self.steps if step.event is Event.BACKWARD)

    def note(self, event: Event, buffer: int, live: Sequence[int]) -> None:
        """An event; ``live`` bytes by kind."""
        self.steps.append(Step(event, buffer, tuple(live), tuple(live)))

    def changed(self, live: Sequence[int], scratch: int) -> None:
        """Tensors were made."""
        step = self.steps[-1]
        if sum(live) + scratch > sum(step.peak) + step.scratch:
            step.peak, step.scratch = tuple(live), scratch


def between(first: Timeline, last: Timeline, share: float) -> Timeline:
    """The timeline of a micro-batch between two: ``share`` 0 is the first, 1 the last."""

    def mix(a: int, b: int) -> int:
        return round(a + (b - a) * share)

    steps = [
        Step(
            one.event,
            one.buffer,
            tuple(map(mix, one.before, other.before)),
            tuple(map(mix, one.peak, other.peak)),
            mix(one.scratch, other.scratch),
        )
        for one, other in zip(first.steps, last.steps, strict=True)
    ]
    on_host = mix(first.activations_on_host, last.activations_on_host)
    return Timeline(first.buffers, first.constants, steps, on_host, first.sources)


class _Buffer(FlatBuffer):
    """Notes what is done to it."""

    note: Callable[[Event], None]

    def start_gather(self, *, exact: bool = False) -> bool:
        if self.state is not BufferState.RELEASED:
            return False
        self.state = BufferState.IN_FLIGHT
        self.note(Event.GATHER)
        return True

    def gather(self) -> None:
        self.start_gather()
        self.state = BufferState.GATHERED

    def release(self, *, force: bool = False, spare_users: bool = False) -> None:
        if self.sharded and self.state is not BufferState.RELEASED:
            self.state = BufferState.RELEASED
            self.note(Event.RELEASE)


class _Gradient(GradientBuffer):
    """Notes what is done to it; ``partial`` and ``owned`` hold nothing."""

    note: Callable[[Event], None]

    def collect(self, factor: float = 1.0, *, soon: bool = False) -> None:
        params = [self.buffer.params[index] for index in self.ready]
        self.ready.clear()
        if not any(param.grad is not None for param in params):
            return
        self.note(Event.COLLECT)
        for param in params:
            param.grad = None
        self.partial = torch.empty(0)

    def reduce(self, *, last: bool = False, nothing: bool = False) -> None:
        if self.partial is None:
            self.note(Event.COLLECT)  # takes part with zeros
        self.note(Event.REDUCE)
        self.partial, self.owned = None, torch.empty(0)


def _replicas(param: nn.Parameter) -> Replicas:
    if is_tied_over_stages(param):
        return _TIED
    return _CUT if is_cut(param) or expert_processes(param) > 1 else _WHOLE


def record(
    model: nn.Module, inputs: Mapping[str, Any], sharding: Sharding, *, wide: int = 0, keeps_outputs: bool = False
) -> Timeline:
    """Run forward and backward of ``model``, which lies on the meta device in the dtype it trains in.

    Args:
        inputs: keyword arguments of its forward, on the meta device; it must return a loss.
        wide: size of the vocabulary, by which logits are known.
        keeps_outputs: see ``Workload``.
    """
    trained = {id(param): 0 for param in model.parameters() if param.requires_grad}
    managed = [param for param in model.parameters() if sharding.parameters or not is_packed(param)]
    planned = plan_units(model, managed, sharding.units, trained, _replicas)
    units = list(planned)
    constants = sum(buffer.untyped_storage().nbytes() for buffer in model.buffers())
    if not sharding.parameters:  # packed weights lie by themselves
        constants += sum(param.nbytes for param in model.parameters() if is_packed(param))
    timeline = Timeline([], constants)
    tracker = LiveTensors(timeline.changed, wide)
    for tensor in (*model.parameters(), *model.buffers()):
        tracker.ignore(tensor)
    gradients = _stand_in(planned, timeline, tracker)
    reducer = Reducer(units, gradients, every_micro_batch=True)
    hooks = UnitHooks(units, reducer, Prefetch(sharding.prefetch, sharding.max_live))
    labels = [param.register_post_accumulate_grad_hook(_Label(tracker)) for param in _trained(gradients)]  # type: ignore[no-untyped-call]
    hooks.install(model)
    offload = offload_of(model, tracker) if sharding.offloads else None
    tiled = _tile(model, sharding)
    compiled = [CompiledBlocks(blocks_of(units, model), sharding.budget)] if sharding.compiled else []
    adapters = FusedAdapters(model, counts=True) if sharding.fuses_adapters else None
    timeline.note(Event.START, -1, tracker.live)
    try:
        with tracker, launching_nothing(), autocast_of_meta():
            if sharding.parameters:
                _teach_order(model, inputs, hooks, timeline)
            with AsOnCuda():
                outputs = model(**inputs)
                loss = loss_of(outputs)
            if not keeps_outputs:
                del outputs
            timeline.note(Event.BACKWARD, -1, tracker.live)
            with hooks.driving():
                _backward(loss)
        if offload is not None:
            timeline.activations_on_host = offload.offload.arena.nbytes
    finally:
        for handle in (*compiled, *tiled, *([offload] if offload is not None else [])):
            handle.remove()
        if adapters is not None:
            adapters.close()
        hooks.remove()
        for handle in labels:
            handle.remove()
        for param in model.parameters():
            param.grad = None
    return timeline


def _tile(model: nn.Module, sharding: Sharding) -> list[TiledMlps | ChunkedLoss | PartialLoss]:
    """Tiles, as ``engine.tiling`` attaches them."""
    found: list[TiledMlps | ChunkedLoss | PartialLoss] = []
    if sharding.tiled_mlp is not None:
        found.append(TiledMlps(model, sharding.tiled_mlp))
    if sharding.chunked_loss:
        found.append(ChunkedLoss(model))
    elif not sharding.gathers_logits:
        found.append(PartialLoss(model))
    return found


def _teach_order(model: nn.Module, inputs: Mapping[str, Any], hooks: UnitHooks, timeline: Timeline) -> None:
    """A forward that is not recorded: units are gathered ahead once it is known in which order they are used."""
    with AsOnCuda():
        model(**inputs)
    hooks.flush()
    hooks.reset()
    del timeline.steps[1:]
    timeline.steps[0].peak, timeline.steps[0].scratch = timeline.steps[0].before, 0


def _backward(loss: Tensor) -> None:
    """Backward, with recomputations as on CUDA.

    ``loss.backward()`` would leave the function mode for as long as it runs, so this calls what that calls.
    """
    engine: Any = torch.autograd.Variable._execution_engine
    with AsOnCuda():
        engine.run_backward((loss,), (torch.ones_like(loss),), False, False, (), True, accumulate_grad=True)


def loss_of(outputs: Any) -> Tensor:
    """The loss in what a model's forward returned."""
    loss = getattr(outputs, "loss", None)
    if loss is None and isinstance(outputs, Mapping):
        loss = outputs.get("loss")
    if loss is None and isinstance(outputs, tuple | list) and outputs:
        loss = outputs[0]
    loss = outputs if loss is None else loss
    assert isinstance(loss, Tensor)
    return loss


class _Label:
    """The gradient of a parameter is in its place."""

    def __init__(self, tracker: LiveTensors) -> None:
        self.tracker = tracker

    def __call__(self, param: Tensor) -> None:
        if param.grad is not None:
            self.tracker.relabel(param.grad, Kind.GRADIENTS)


def _trained(gradients: Mapping[Unit, Sequence[GradientBuffer]]) -> list[nn.Parameter]:
    return [param for buffers in gradients.values() for buffer in buffers for param in buffer.buffer.params]


def _stand_in(
    planned: Mapping[Unit, Sequence[BufferSpec]], timeline: Timeline, tracker: LiveTensors
) -> dict[Unit, list[GradientBuffer]]:
    """Give the units buffers that note what is done to them."""
    gradients: dict[Unit, list[GradientBuffer]] = {}

    def noter(index: int) -> Callable[[Event], None]:
        return lambda event: timeline.note(event, index, tracker.live)

    for unit, specs in planned.items():
        for spec in specs:
            buffer = _Buffer(spec.params, _ALONE, dtype=spec.dtype, device=_META, sharded=spec.sharded)
            buffer.state = BufferState.RELEASED if spec.sharded else BufferState.GATHERED
            buffer.device = torch.device("cpu")  # where the reducer makes the little it needs
            buffer.note = noter(len(timeline.buffers))
            unit.buffers.append(buffer)
            timeline.sources.append(max(getattr(p, SOURCE, p.element_size()) for p in spec.params))
            timeline.buffers.append(
                replace(spec, params=(), replicas=None if spec.replicas == _WHOLE else spec.replicas)
            )
            if spec.trains:
                gradient = _Gradient(buffer, _POLICY)
                gradient.note = buffer.note
                gradients.setdefault(unit, []).append(gradient)
    return gradients
