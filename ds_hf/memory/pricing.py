"""From a timeline and a plan to bytes: what the buffers hold at each of the timeline's events.

A pure function of the timeline, the plan and the number of processes. It knows what ``engine.zero`` allocates: the
gathered unit, the flat gradient beside the gradients it is made of, the shard beside the flat gradient it is reduced
from; and what lies elsewhere: masters, moments and reduced gradients that the plan keeps on the host or on disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from ds_hf.config.plan import Placement, StatePlan
from ds_hf.engine.optim.stream_share import HostUnit, Streaming, auto_share, slots_room, streaming
from ds_hf.engine.zero.estimate import ITEM_NBYTES
from ds_hf.engine.zero.layout import FlatLayout
from ds_hf.engine.zero.planning import BufferSpec
from ds_hf.memory.feedback import loco_nbytes, one_bit_nbytes
from ds_hf.memory.prediction import Prediction
from ds_hf.memory.timeline import Event, Step, Timeline
from ds_hf.memory.tracker import Kind, rounded

__all__ = ["DEVICE_MEMORY", "Costs", "price"]

MIB = 1 << 20
# Of an H100 with CUDA 13; an A100 takes less. cuBLAS keeps one workspace a thread that computes: forward and backward.
CUBLAS = 2 * 32 * MIB
CONTEXT = 560 * MIB
NCCL = 700 * MIB
DEVICE_MEMORY = 80 << 30  # where it is not said how much there is
SEGMENT, SPLIT = 20 * MIB, 0.02  # what the caching allocator holds and cannot use: a segment, and a share of the rest


@dataclass(frozen=True)
class Costs:
    """What else must be known to price a timeline.

    Attributes:
        world_size: processes; of a pipeline those of one stage.
        moments: full-size tensors of state that the optimizer keeps.
        accumulation_steps: micro-batches to a step.
        whole_step: the optimizer makes its own ``step()`` over gradients in the masters' dtype.
        optimizer_place, parameter_place: ``"device"``, ``"cpu"`` or ``"nvme"``.
        pinned: host states are page-locked.
        streams: reductions run beside the computation, so that what is reduced from lives a little longer.
        split_masters: of masters of 16-bit parameters two bytes are kept.
        device_share: of the states in host memory, the share that stays on the device (``offload_optimizer.ratio``).
        streamed_share: of the others, the share that the GPU updates on their way over the device
            (``ds_hf.offload.stream``); ``"auto"``: as the engine decides with a fast link.
        device_memory: bytes of the whole device, which that depends on.
        cut_over: processes that share each layer, or divide its experts.
        pipe: stages of a pipeline.
        in_flight: micro-batches whose activations are kept at once.
        one_bit: the optimizer averages momenta in one bit; what that takes is none of ``moments``.
        chosen: share of the elements that the device updates in every step (``zenflow.topk_ratio``), 0 without that ...
        chosen_on_host: ... while their states are in host memory.
    """

    world_size: int
    moments: int
    accumulation_steps: int
    whole_step: bool
    optimizer_place: str
    parameter_place: str
    pinned: bool
    streams: bool = True
    split_masters: bool = False
    device_share: float = 0.0
    streamed_share: float | Literal["auto"] = 0.0
    device_memory: int = DEVICE_MEMORY
    cut_over: int = 1
    pipe: int = 1
    in_flight: float = 1.0
    one_bit: bool = False
    chosen: float = 0.0
    chosen_on_host: bool = False


@dataclass(frozen=True)
class _Sizes:
    """Bytes of one buffer: whole and owned parameters and gradients, masters, moments.

    Attributes:
        shard: what it is gathered from.
        first: where that is a second shard (``zero_hpz_partition_size``), the one beside it that the optimizer writes.
        here: its states are on the device.
        waits: its reduced gradient waits for the step on the device.
    """

    here: bool
    waits: bool
    whole: int
    shard: int
    first: int
    rests: int
    gathered: int
    upload: int
    flat: int
    summed: int
    owned: int
    owned_summed: int
    master: int
    moments: int


_NOTHING = _Sizes(False, False, *[0] * 12)


@dataclass
class _Peak:
    """The moment at which most is in use so far."""

    total: int = -1
    moment: str = ""
    parts: dict[str, int] = field(default_factory=dict)

    def offer(self, moment: str, parts: dict[str, int]) -> None:
        total = sum(parts.values())
        if total > self.total:
            self.total, self.moment, self.parts = total, moment, dict(parts)


def price(timeline: Timeline, plan: StatePlan, costs: Costs, *, micro_batch: int) -> Prediction:
    """What one process needs."""
    places = _states_here(timeline, plan, costs)
    sizes = [_sizes(spec, plan, costs, here) for spec, here in zip(timeline.buffers, places, strict=True)]
    peak = _Peak()
    share, streamed = _streamed(timeline, sizes, plan, costs)
    base = _resident(timeline, sizes, costs) | {"states on their way": streamed.slots}
    base["feedback"] = _feedback(timeline, plan, costs)
    base["chosen columns"], _ = _chosen(timeline, plan, costs)
    base["activations in flight"] = round((costs.in_flight - 1) * timeline.kept)  # beside those of one micro-batch
    _initialize(timeline, sizes, costs, peak)
    _Run(timeline, sizes, plan, costs, base, peak).play()
    parts = {name: nbytes for name, nbytes in peak.parts.items() if nbytes}
    host, disk = _elsewhere(timeline, sizes, plan, costs)
    kept = sum(nbytes for name, nbytes in host.items() if name != "loading")
    unusable = SEGMENT + int(SPLIT * peak.total)
    processes = costs.world_size * costs.pipe
    outside = {"CUDA context": CONTEXT, "allocator": unusable} | ({"NCCL": NCCL} if processes > 1 else {})
    pinned = kept if costs.pinned else 0
    return Prediction(parts, peak.moment, outside, host, pinned, disk, micro_batch, processes, share)


def _states_here(timeline: Timeline, plan: StatePlan, costs: Costs) -> list[bool]:
    """For each buffer, whether its states are on the device: the first ones, as ``engine.optim.host_store`` chooses."""
    if costs.optimizer_place != "cpu":
        return [costs.optimizer_place == "device"] * len(timeline.buffers)
    owned = [_owned(spec, plan, costs) if spec.trains else 0 for spec in timeline.buffers]
    room, places = costs.device_share * sum(owned) * (1 + 1e-9), []
    for spec, numel in zip(timeline.buffers, owned, strict=True):
        stays = not spec.sharded or costs.parameter_place == "device"
        places.append(bool(numel) and stays and numel <= room)
        room -= numel if places[-1] else 0
    return places


def _streamed(timeline: Timeline, sizes: list[_Sizes], plan: StatePlan, costs: Costs) -> tuple[float, Streaming]:
    """The share of the states in host memory that goes up to be updated, and what follows; in ``sizes`` too."""
    if costs.optimizer_place != "cpu":
        return 0.0, streaming((), 0.0, 0)
    away = [index for index, size in enumerate(sizes) if timeline.buffers[index].trains and not size.here]
    split = [_master_in_halves(timeline.buffers[index], sizes[index], plan, costs) for index in away]
    summed = plan.reduces_every_micro_batch and costs.accumulation_steps > 1
    units = [
        HostUnit(
            numel=_owned(timeline.buffers[index], plan, costs),
            states=master + sizes[index].moments,
            gradient=sizes[index].owned_summed if summed else sizes[index].owned,
            movable=_may_stream(timeline.buffers[index], plan, costs),
        )
        for index, master in zip(away, split, strict=True)
    ]
    share, room = costs.streamed_share, slots_room(costs.device_memory)
    if share == "auto":
        share = auto_share(units, costs.world_size, room)
    found = streaming(units, share, room)
    for index, master, goes, waits in zip(away, split, found.up, found.stays, strict=True):
        sizes[index] = replace(sizes[index], master=master if goes else sizes[index].master, waits=waits)
    return share, found


def _master_in_halves(spec: BufferSpec, size: _Sizes, plan: StatePlan, costs: Costs) -> int:
    """Bytes of the master of a unit that goes up: split where it may be."""
    if costs.split_masters and spec.itemsize == 2:
        return rounded(_owned(spec, plan, costs) * (ITEM_NBYTES[plan.optimizer.dtype or "float32"] - spec.itemsize))
    return size.master


def _may_stream(spec: BufferSpec, plan: StatePlan, costs: Costs) -> bool:
    """Not where master weights are in files, or are parameters in host memory themselves."""
    if not spec.sharded or costs.parameter_place == "device":
        return True
    return costs.parameter_place == "cpu" and spec.itemsize != ITEM_NBYTES[plan.optimizer.dtype or "float32"]


def _owned(spec: BufferSpec, plan: StatePlan, costs: Costs) -> int:
    """Elements that this process updates."""
    layout = FlatLayout(spec.shapes, _shards(spec, plan, costs))
    return layout.shard_numel if plan.shards_optimizer else layout.numel


def _shards(spec: BufferSpec, plan: StatePlan, costs: Costs) -> int:
    """Into how many shards the states of a buffer are divided."""
    return plan.shards(plan.optimizer.over if spec.trains else plan.parameters.over, _replicas(spec, costs))


def _replicas(spec: BufferSpec, costs: Costs) -> int:
    """Processes that hold the same values: all of the stage, but of parts of layers that are cut; of what two
    stages hold those of both."""
    if spec.label:
        return 2 * costs.world_size
    return costs.world_size if spec.replicas is None else costs.world_size // costs.cut_over


def _sizes(spec: BufferSpec, plan: StatePlan, costs: Costs, here: bool) -> _Sizes:
    shards, neighbours = _shards(spec, plan, costs), plan.shards(plan.parameters.over, _replicas(spec, costs))
    layout = FlatLayout(spec.shapes, shards)
    owned = _owned(spec, plan, costs)
    sixteen = spec.itemsize == 2
    grad = ITEM_NBYTES[plan.communication_dtype] if plan.communication_dtype else spec.itemsize
    summed = ITEM_NBYTES[plan.gradients.dtype or "float32"]
    target = ITEM_NBYTES[plan.optimizer.dtype or "float32"] if sixteen else spec.itemsize
    aliased = target == spec.itemsize and here
    beside = target - spec.itemsize if costs.split_masters and sixteen and here else target
    apart = spec.sharded and (neighbours > 1 or costs.parameter_place != "device")
    whole, first = rounded(layout.numel * spec.itemsize), rounded(layout.shard_numel * spec.itemsize)
    twice = spec.sharded and neighbours != shards
    shard = rounded(layout.numel // neighbours * spec.itemsize) if twice else first
    trains = int(spec.trains)
    moment = ITEM_NBYTES[plan.moments] if sixteen else spec.itemsize
    return _Sizes(
        here=here,
        waits=here,
        whole=whole,
        shard=shard,
        first=first if twice else 0,
        rests=shard + (first if twice else 0) if apart else whole,
        gathered=whole if apart else 0,
        upload=shard if apart and costs.parameter_place != "device" and neighbours > 1 else 0,
        flat=trains * rounded(layout.numel * grad),
        summed=trains * rounded(layout.numel * summed),
        owned=trains * rounded(owned * grad),
        owned_summed=trains * rounded(owned * summed),
        master=0 if aliased else trains * rounded(owned * beside),
        moments=trains * costs.moments * rounded(owned * moment),
    )


def _resident(timeline: Timeline, sizes: list[_Sizes], costs: Costs) -> dict[str, int]:
    """What stays on the device all the time."""
    return {
        "parameters": sum(
            size.rests
            for spec, size in zip(timeline.buffers, sizes, strict=True)
            if not spec.sharded or costs.parameter_place == "device"
        )
        + timeline.constants,
        "masters": sum(size.master for size in sizes if size.here),
        "moments": sum(size.moments for size in sizes if size.here),
        "workspaces": CUBLAS,
    }


def _chosen(timeline: Timeline, plan: StatePlan, costs: Costs) -> tuple[int, int]:
    """Of ZenFlow, on the device: where they are, gradients and new values, and masters and moments, if those are not on
    the host; and on the host, where means of gradients, the next gradients and new values of all wait."""
    if not costs.chosen:
        return 0, 0
    nbytes, host = 0, 0
    for spec in timeline.buffers:
        numel = _owned(spec, plan, costs) if spec.trains else 0
        states = ITEM_NBYTES["float32"] * (1 + costs.moments)
        grads = ITEM_NBYTES["float32"] if costs.accumulation_steps > 1 else spec.itemsize
        beside = 4 + spec.itemsize + grads  # a position has 4 bytes
        nbytes += int(costs.chosen * numel) * (beside + (0 if costs.chosen_on_host else states))
        host += numel * (ITEM_NBYTES["float32"] + grads + spec.itemsize)
        host += int(costs.chosen * numel) * states * costs.chosen_on_host
    return nbytes, host


def _feedback(timeline: Timeline, plan: StatePlan, costs: Costs) -> int:
    """What few bits between processes keep."""
    trained = [spec for spec in timeline.buffers if spec.trains]
    if costs.one_bit:
        return one_bit_nbytes([spec.numel for spec in trained], costs.world_size)
    return loco_nbytes([FlatLayout(spec.shapes, _shards(spec, plan, costs)) for spec in trained], plan)


def _initialize(timeline: Timeline, sizes: list[_Sizes], costs: Costs, peak: _Peak) -> None:
    """Unit after unit: its values in the widest dtype, cast, and its master; moments come with the first step."""
    done = 0
    for (spec, source), size in zip(timeline.loaded, sizes, strict=True):
        wide = max(source, spec.itemsize)
        staged = size.whole * wide // spec.itemsize
        cast = size.whole if wide != spec.itemsize else 0
        again = size.gathered  # a storage of its own for gathers, before it is released
        on_device = not spec.sharded or costs.parameter_place == "device"
        kept = (size.rests if on_device else 0) + (size.master if size.here else 0)
        extra = staged + cast + again - (0 if size.gathered else size.whole)
        peak.offer("initialize", {"parameters": done + kept, "temporary": extra})
        done += kept


class _Run:
    """One micro-batch with a step at its end, late in a run."""

    def __init__(
        self,
        timeline: Timeline,
        sizes: list[_Sizes],
        plan: StatePlan,
        costs: Costs,
        base: dict[str, int],
        peak: _Peak,
    ) -> None:
        self.timeline, self.sizes, self.plan, self.costs = timeline, sizes, plan, costs
        self.base, self.peak = base, peak
        self.every = plan.reduces_every_micro_batch
        self.many = costs.accumulation_steps > 1
        self.moment = "forward"
        self.gathered = 0
        self.kept = 0  # flat gradients that are being reduced: ``CommStream.keep``
        # sums of the micro-batches before: reduced where every one is, and this process's own where only the last is
        self.flat = sum(self._before(size.flat, size.summed) for size in sizes) if self.many and not self.every else 0
        reduced = self.many and self.every
        self.owned = sum(self._before(s.owned, s.owned_summed) for s in sizes if s.waits) if reduced else 0

    def _before(self, single: int, summed: int) -> int:
        """A sum: in the communication dtype as long as it is one gradient."""
        return summed if self.costs.accumulation_steps > 2 else single

    def play(self) -> None:
        for step in self.timeline.steps:
            if step.event is Event.BACKWARD:
                self.moment = "backward"
            elif step.buffer >= 0:
                self._event(step, self.sizes[step.buffer])
            self._offer(step.peak, step.scratch)
        self._step()

    def _event(self, step: Step, size: _Sizes) -> None:
        if step.event is Event.GATHER:
            self.gathered += size.gathered
            self._offer(step.before, size.upload)
        elif step.event is Event.RELEASE:
            self.gathered -= size.gathered
        elif step.event is Event.COLLECT:
            self._collect(step, size)
        elif step.event is Event.REDUCE:
            self._reduce(step, size)

    def _collect(self, step: Step, size: _Sizes) -> None:
        if self.many and not self.every:
            before = self._before(size.flat, size.summed)
            together = size.flat if self.costs.accumulation_steps == 2 else 0  # the gradients before were left alone
            self._offer(step.before, max(together, size.summed if before != size.summed else 0))
            self.flat += size.summed - before
        else:
            self.kept = 0  # ``CommStream.settle``
            self._offer(step.before, 0)
            self.flat += size.flat  # where backward left them, until they are reduced

    def _reduce(self, step: Step, size: _Sizes) -> None:
        partial = size.summed if self.many and not self.every else size.flat
        cast = size.flat if partial != size.flat else 0
        shard = size.owned if self.costs.world_size > 1 and size.owned != size.flat else 0
        if not self.many or self.every:
            self._offer(step.before, size.flat)  # copied together
        self._offer(step.before, cast + shard)
        self.flat -= partial
        if self.costs.streams and self.costs.world_size > 1:
            self.kept += size.flat
        if not size.waits:
            return
        if self.many and self.every:
            before = self._before(size.owned, size.owned_summed)
            self.owned += size.owned_summed - before
            self._offer(step.before, size.owned + (before if before != size.owned_summed else 0))
        else:
            self.owned += size.owned

    def _step(self) -> None:
        """Everything reduced; optimizers that step as a whole want gradients in the masters' dtype, all at once."""
        self.moment, self.kept = "step", 0
        cast = sum(size.owned_summed for size in self.sizes if size.here) if self.costs.whole_step else 0
        sent = max((size.shard for size in self.sizes if size.first), default=0)  # of second shards, unit after unit
        self._offer(tuple(0 for _ in Kind), cast + sent)

    def _offer(self, live: tuple[int, ...], extra: int) -> None:
        parts = {
            **self.base,
            "gathered units": self.gathered,
            "gradients": live[Kind.GRADIENTS] + self.flat + self.kept + self.owned,
            "activations": live[Kind.ACTIVATIONS],
            "logits and loss": live[Kind.LOGITS],
            "temporary": live[Kind.TEMPORARY] + extra,
        }
        self.peak.offer(self.moment, parts)


def _elsewhere(
    timeline: Timeline, sizes: list[_Sizes], plan: StatePlan, costs: Costs
) -> tuple[dict[str, int], dict[str, int]]:
    """Parts in host memory and on disk. What is on disk passes through the host one unit at a time."""
    host = {"loading": sum(spec.numel * source for spec, source in timeline.loaded)}
    host["activations"] = timeline.activations_on_host
    disk: dict[str, int] = {}
    for name, place, nbytes, largest in _rows(timeline, sizes, plan, costs):
        if place == "cpu":
            host[name] = nbytes
        elif place == "nvme":
            disk[name] = nbytes
            host[f"{name} on their way"] = 2 * largest
    return {key: value for key, value in host.items() if value}, disk


def _rows(
    timeline: Timeline, sizes: list[_Sizes], plan: StatePlan, costs: Costs
) -> Iterator[tuple[str, str, int, int]]:
    """(name, place, bytes, bytes of the largest buffer)."""
    accumulates = costs.accumulation_steps > 1
    away = [size for size in sizes if not size.here] or [_NOTHING]
    gradients = [size.owned_summed if accumulates else size.owned for size in sizes if not size.waits] or [0]
    shards = [size.shard if spec.sharded else 0 for spec, size in zip(timeline.buffers, sizes, strict=True)]
    place = costs.optimizer_place
    yield "masters", place, sum(size.master for size in away), max(size.master for size in away)
    yield "moments", place, sum(size.moments for size in away), max(size.moments for size in away)
    # reduced gradients stay in host memory, also where the states are on disk
    kept = "cpu" if place == "nvme" else place
    yield "gradients", kept, sum(gradients), max(gradients)
    yield "gradients that wait", "cpu", _chosen(timeline, plan, costs)[1], 0
    if plan.parameters.placement is Placement.SHARDED:
        yield "parameters", costs.parameter_place, sum(shards), max(shards)
        firsts = [size.first for size in sizes]
        # In host memory also where the second shards are in files.
        kept = "device" if costs.parameter_place == "device" else "cpu"
        yield "first shards of parameters", kept, sum(firsts), max(firsts)
