"""Whole optimizer steps at other batch sizes, on the script's own batch, inside the engine.

Sizes are timed in turns, with readings of the machine between them (``measure.turns``, ``probe``). Invariants: learning
rates are 0 while replaying, and neither schedules nor step hooks run; out of memory on one rank is out of memory on
all, at the same collective; afterwards the engine has its batch sizes back.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_hf.engine.accumulation import BatchSizes
from ds_hf.engine.comm import collectives
from ds_hf.engine.comm.memory import shared_out_of_memory
from ds_hf.engine.observe.probes.trial.batches import Batch, resized
from ds_hf.engine.observe.probes.trial.clock import Clock
from ds_hf.engine.observe.probes.trial.lengths import find_longest, length_event, lengthened
from ds_hf.engine.observe.probes.trial.memory import MemoryMeter, agree_max, is_out_of_memory
from ds_hf.engine.observe.probes.trial.probe import Probe
from ds_hf.measure.protocol import TrialRequest
from ds_hf.measure.statistics import Summary
from ds_hf.measure.turns import StopRules, Timing, settle, take_turns

if TYPE_CHECKING:
    from ds_hf.engine.engine import CoreEngine

__all__ = ["NoLoss", "NotResizable", "Replay", "loss_in"]

ROUND = 4  # steps of a visit
SKIPPED_AT_MOST = 40  # steps that a loss scale may take to come down
SLOWER, GIVE_UP = 1.1, 2  # two points in a row this much slower than the best: the rest is left out
LOST = 1.6  # times slower than the best point of the trial: not worth more steps

Emit = Callable[..., None]
Size = tuple[int, int]  # micro-batch, accumulation


class NoLoss(ValueError):
    """The model's output has no loss, so a micro-batch cannot be repeated without the script."""


class NotResizable(ValueError):
    """The model does not take other numbers of samples than the script's."""


def loss_in(output: Any) -> Tensor:
    """The loss in a model's output: ``.loss``, the key "loss", the first item, or the output itself.

    Raises:
        NoLoss: there is none.
    """
    found = output
    if isinstance(output, Mapping):
        found = output.get("loss")
    elif hasattr(output, "loss"):
        found = output.loss
    elif isinstance(output, list | tuple) and output:
        found = output[0]
    if isinstance(found, Tensor) and found.numel() == 1 and found.requires_grad:
        return found
    raise NoLoss("the model returns no loss (the script computes it outside), so only the script's own steps are timed")


@dataclass
class _Point:
    """A size that fits: its batch, the peak bytes, the tokens of its sequences where the longest are wanted, and
    seconds of the update in each step."""

    batch: Batch
    peak: int
    length: int | None = None
    updates: list[float] = field(default_factory=list)


class Replay:
    """Steps of one engine.

    Args:
        batch: what the script passed to the engine.
        emit: writes an event: its name, and its fields as keywords.
    """

    def __init__(self, engine: CoreEngine, batch: Batch, request: TrialRequest, meter: MemoryMeter, emit: Emit) -> None:
        self.engine, self.batch, self.request, self.meter, self.emit = engine, batch, request, meter, emit
        self.worst: Batch | None = None  # the longest samples of the data set
        self.best = math.inf if request.best is None else request.best  # seconds a sample
        self.fastest: Size | None = None
        self.probe = Probe(engine)
        self._points: dict[Size, _Point] = {}
        self._compared = False  # with the machine on which ``best`` was measured
        self._limit = math.inf  # the smallest micro-batch that did not fit
        self._before: int | None = None
        self._upwards, self._slower, self._skipped = True, 0, 0

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Inside, steps change nothing but moments, counters and random states."""
        engine = self.engine
        optimizer = engine.optimizer
        assert optimizer is not None
        scheduler, forced = engine.lr_scheduler, engine.accumulation.forced
        sizes, steps = engine.batch, engine.accumulation.steps
        reducer = engine.reducer
        suspended, reducer.suspended = reducer.suspended, False  # a script whose loop says no_sync(): its own, outside
        rates = [group.get("lr") for group in optimizer.param_groups]
        engine.lr_scheduler = None
        for group in optimizer.param_groups:
            if isinstance(group.get("lr"), float | int):
                group["lr"] = 0.0
        try:
            with engine.events.paused():
                yield
        finally:
            engine.lr_scheduler, engine.accumulation.forced = scheduler, forced
            engine.batch, engine.accumulation.steps = sizes, steps
            reducer.suspended = suspended
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                if "lr" in group:
                    group["lr"] = rate
            self.clean_up()

    def step(self, batch: Batch, accumulation: int, clock: Clock | None = None) -> None:
        """One optimizer step of ``accumulation`` micro-batches; marks: before the update, and after it."""
        engine = self.engine
        engine.accumulation.steps = accumulation
        engine.batch = BatchSizes(batch.numel * accumulation * engine.mesh.shape.data, batch.numel, accumulation)
        for index in range(accumulation):
            engine.accumulation.forced = index == accumulation - 1
            loss = loss_in(engine(*batch.args, **batch.kwargs))
            engine.backward(loss)
            if clock is not None and engine.accumulation.forced:
                clock.mark()
            engine.step()
        if clock is not None:
            clock.mark()

    def fits(self, batch: Batch, numel: int, accumulation: int) -> tuple[bool, int]:
        """Run a step of ``batch`` with ``numel`` samples, with room for every rank to fail together.

        Returns:
            whether it fits, and the peak bytes of the rank that needed most.
        """
        peaks: list[int] = []
        fine = True
        try:
            # the meter is inside: what the ranks say to each other must not cross the limit again
            with shared_out_of_memory(self.engine.mesh, is_out_of_memory):
                sized = resized(batch, numel)  # the inputs alone may be too large
                with self.meter.watch(peaks):
                    self.step(sized, min(accumulation, 2))  # the second micro-batch adds to the sums of the first
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            fine = False
            self.clean_up()
        most = peaks[0] if peaks else self.meter.at_rest()
        peak = agree_max(self.engine, most, lambda t: collectives.all_reduce_max(t, self.engine.mesh.world, "a peak"))
        return fine, peak

    def take_one(self) -> None:
        """A first step, of one sample.

        Raises:
            NotResizable: the model, of any process, does not take it (batch norm, a division of the batch).
        """
        failed: Exception | None = None
        mesh = self.engine.mesh
        try:
            with shared_out_of_memory(mesh, lambda error: not isinstance(error, NoLoss)):
                self.step(resized(self.batch, 1), 1)
        except NoLoss:
            raise
        except Exception as error:  # the model's own, of any kind
            failed = error
            self.clean_up()
        why = f"{type(failed).__name__}: {failed}" if failed is not None and not is_out_of_memory(failed) else ""
        flag = torch.tensor([bool(why)], dtype=torch.int32, device=self.engine.device)
        collectives.all_reduce_max(flag, mesh.world, "whether the model takes one sample")
        if bool(flag):
            raise NotResizable(f"the model does not take one sample ({why or 'on another process'}), so only the "
                               "script's own steps are timed")  # fmt: skip

    def clean_up(self) -> None:
        """Forget a step that failed in the middle."""
        engine = self.engine
        engine.reducer.clear()
        engine.hooks.abandon()
        engine.hooks.reset()
        gc.collect()
        if engine.device.type == "cuda":
            torch.cuda.empty_cache()

    def measure_all(self, points: Sequence[Size]) -> Size | None:
        """Every size, in turns; after one that did not fit, no larger one. Returns the fastest."""
        asked = self.request
        rules = StopRules(asked.steps, asked.point_seconds, asked.precision, alone=bool(self.engine.compiler.compiled))
        visits = take_turns(
            points, self._prepare, self._visit, self._read, rules, agree=self._agreed, lost=self._looked_at
        )
        if visits:
            found = settle(visits)
            for point, summary in found.points.items():
                self._report(point, summary)
            self._report_machine(found)
            each = {
                (micro, steps): self._of_rank_0(s.median / micro / steps) for (micro, steps), s in found.points.items()
            }
            self.fastest = min(each, key=lambda point: each[point])
        return self.fastest

    def _prepare(self, point: Size) -> bool:
        """Whether the point is worth timing and fits; then it is ready."""
        micro, accumulation = point
        if self._before is not None and micro != self._before and (micro > self._before) != self._upwards:
            self._upwards, self._slower = micro > self._before, 0
        self._before = micro
        gives_up = self._slower == GIVE_UP and not self.request.largest and self.request.length is None
        left_out = {"outcome": "slower", "reason": "the last ones were"} if gives_up else {}
        if micro >= self._limit:
            left_out = {"outcome": "oom", "reason": "a smaller one did not fit"}
        if left_out:
            self.emit("point", micro=micro, accumulation=accumulation, **left_out)
            return False
        self._forget_shapes()
        length = None
        if self.request.length is None:
            fine, peak = self.fits(self.longest, micro, accumulation)
        else:
            length, peak = self._find_length(micro, accumulation)
            fine = length > 0
        if self.worst is not None or length:
            self._forget_shapes()
        if not fine:
            self._limit, self._slower = micro, 0
            self.emit("point", micro=micro, accumulation=accumulation, outcome="oom", peak=peak, reason="out of memory")
            return False
        batch = self._of_length(length) if length else self.batch
        self._points[point] = _Point(resized(batch, micro), peak, length)
        return True

    def batch_of(self, point: Size) -> Batch:
        """The batch of a size that fits."""
        return self._points[point].batch

    @property
    def longest(self) -> Batch:
        """The longest samples that are known."""
        return self.batch if self.worst is None else self.worst

    def _of_length(self, tokens: int) -> Batch:
        """Of whole sequences, of which this process may have a part."""
        return lengthened(self.longest, tokens // self.engine.mesh.shape.sequence)

    def _find_length(self, micro: int, accumulation: int) -> tuple[int, int]:
        """Tokens of the longest sequences that fit, 0 for none, and the peak bytes with them."""
        wanted, known, peaks = self.request.length, length_event(self.engine, self.longest), {0: 0}
        own, step = (int(self._of_rank_0(known[name])) for name in ("own", "step"))

        def fits(tokens: int) -> bool:
            self._forget_shapes()
            fine, peaks[tokens] = self.fits(self._of_length(tokens), micro, accumulation)
            return fine

        if self.request.exactly:
            assert wanted
            found = wanted if fits(wanted) else 0
        else:
            found = find_longest(fits, wanted or own, step, known["most"], known=bool(wanted))
        return found, peaks[found]

    def _looked_at(self, found: Summary, point: Size) -> bool:
        """After a first visit: note the best, and whether this one is out of the question."""
        micro, accumulation = point
        each = self._of_rank_0(found.median / micro / accumulation)
        self.best = min(self.best, each)
        self._slower = self._slower + 1 if each > SLOWER * self.best else 0
        self._report(point, found)  # what is known should the launch be ended
        return found.low / micro / accumulation > LOST * self.best

    def _report(self, point: Size, found: Summary) -> None:
        (micro, accumulation), kept = point, self._points[point]
        updates = sorted(kept.updates[found.warm_up :])
        self.emit(
            "point", micro=micro, accumulation=accumulation, outcome="ok", peak=kept.peak, seconds=found.median,
            low=found.low, high=found.high, steps=found.steps, warm_up=found.warm_up,
            optimizer_seconds=updates[len(updates) // 2], longest=self.worst is not None,
            **({} if kept.length is None else {"length": kept.length}),
        )  # fmt: skip

    def _report_machine(self, found: Timing[Size]) -> None:
        levels = {kind: (level.seconds, level.error) for kind, level in found.machine.items()}
        self.emit("machine", levels=levels, drift=found.drift, probe_seconds=self.probe.spent)

    def _forget_shapes(self) -> None:
        """Compiled blocks see each size as if it were the first: a second shape would be compiled for all shapes."""
        if self.engine.compiler.compiled:
            torch.compiler.reset()

    def _visit(self, point: Size) -> list[float]:
        """Seconds of the next steps of a point that were applied: a loss scale may have to come down first."""
        kept, accumulation = self._points[point], point[1]
        totals: list[float] = []
        while not totals:
            clock = Clock(self.engine.device)
            applied = []
            clock.mark()
            for _ in range(min(ROUND, self.request.steps)):
                self.step(kept.batch, accumulation, clock)
                applied.append(self.engine.was_step_applied())
            times = clock.read()
            self._skipped += applied.count(False)
            for index, good in enumerate(applied):
                if good or self._skipped > SKIPPED_AT_MOST:
                    kept.updates.append(times[2 * index + 1])
                    totals.append(times[2 * index] + times[2 * index + 1])
                    self.emit("step", micro=point[0], accumulation=accumulation, seconds=totals[-1], kind="replay")
        return totals

    def _read(self, measured: float) -> dict[str, float]:
        reading = self.probe.read(self._of_rank_0(measured))
        if not self._compared:
            self._compared = True
            kinds = reading.keys() & self.request.machine.keys()  # the best so far, at this machine's speed of now
            change = [math.log(reading[kind] / self.request.machine[kind]) for kind in kinds]
            self.best *= math.exp(sum(change) / len(change)) if change else 1.0
        return reading

    def _agreed(self, done: Any) -> bool:
        """Rank 0's answer, on all ranks."""
        return bool(self._of_rank_0(float(bool(done))))

    def _of_rank_0(self, value: float) -> float:
        """Rank 0's value on all ranks: clocks differ, and what is done next must not."""
        tensor = torch.tensor([value], dtype=torch.float64, device=self.engine.device)
        collectives.broadcast(tensor, self.engine.mesh.world, what="a time")
        return float(tensor)
