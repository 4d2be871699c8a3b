"""Whole optimizer steps at other batch sizes, on the script's own batch, inside the engine.

Invariants: learning rates are 0 while replaying, and neither schedules nor step hooks run; out of memory on one rank is
out of memory on all, at the same collective; afterwards the engine has its batch sizes back.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_hf.engine.accumulation import BatchSizes
from ds_hf.engine.dist import collectives
from ds_hf.engine.dist.memory import shared_out_of_memory
from ds_hf.engine.trial.batches import Batch, resized
from ds_hf.engine.trial.clock import Clock
from ds_hf.engine.trial.memory import MemoryMeter, agree_max, is_out_of_memory
from ds_hf.measure.protocol import TrialRequest
from ds_hf.measure.statistics import summarise

if TYPE_CHECKING:
    from ds_hf.engine.engine import Engine

__all__ = ["NoLoss", "Replay", "loss_in"]

ROUND = 4  # steps between two looks at the clock
SKIPPED_AT_MOST = 40  # steps that a loss scale may take to come down
SLOWER, GIVE_UP = 1.1, 2  # two points in a row this much slower than the best: the rest is left out
LOST = 1.6  # times slower than the best point of the trial: not worth more steps

Emit = Callable[..., None]


class NoLoss(ValueError):
    """The model's output has no loss, so a micro-batch cannot be repeated without the script."""


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


class Replay:
    """Steps of one engine.

    Args:
        batch: what the script passed to the engine.
        emit: writes an event: its name, and its fields as keywords.
    """

    def __init__(self, engine: Engine, batch: Batch, request: TrialRequest, meter: MemoryMeter, emit: Emit) -> None:
        self.engine, self.batch, self.request, self.meter, self.emit = engine, batch, request, meter, emit
        self.worst: Batch | None = None  # the longest samples of the data set
        self.best = float("inf") if request.best is None else request.best  # seconds a sample
        self.fastest: tuple[int, int] | None = None

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Inside, steps change nothing but moments, counters and random states."""
        engine = self.engine
        optimizer = engine.optimizer
        assert optimizer is not None
        hooks, scheduler, forced = list(engine.step_hooks), engine.lr_scheduler, engine.accumulation.forced
        sizes, steps, factor = engine.batch, engine.accumulation.steps, engine.reducer.raw_factor
        rates = [group.get("lr") for group in optimizer.param_groups]
        engine.step_hooks.clear()
        engine.lr_scheduler = None
        for group in optimizer.param_groups:
            if isinstance(group.get("lr"), float | int):
                group["lr"] = 0.0
        try:
            yield
        finally:
            engine.step_hooks[:] = hooks
            engine.lr_scheduler, engine.accumulation.forced = scheduler, forced
            engine.batch, engine.accumulation.steps, engine.reducer.raw_factor = sizes, steps, factor
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                if "lr" in group:
                    group["lr"] = rate
            self.clean_up()

    def step(self, batch: Batch, accumulation: int, clock: Clock | None = None) -> None:
        """One optimizer step of ``accumulation`` micro-batches; marks: before the update, and after it."""
        engine = self.engine
        engine.accumulation.steps = accumulation
        engine.reducer.raw_factor = 1 / accumulation
        engine.batch = BatchSizes(batch.numel * accumulation * engine.axis.world_size, batch.numel, accumulation)
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
            with shared_out_of_memory(self.engine.axis, is_out_of_memory):
                sized = resized(batch, numel)  # the inputs alone may be too large
                with self.meter.watch(peaks):
                    self.step(sized, min(accumulation, 2))  # the second micro-batch adds to the sums of the first
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            fine = False
            self.clean_up()
        most = peaks[0] if peaks else self.meter.at_rest()
        peak = agree_max(self.engine, most, lambda t: collectives.all_reduce_max(t, self.engine.axis, "a peak"))
        return fine, peak

    def clean_up(self) -> None:
        """Forget a step that failed in the middle."""
        engine = self.engine
        engine.hooks.abandon()
        engine.hooks.reset()
        gc.collect()
        if engine.device.type == "cuda":
            torch.cuda.empty_cache()

    def measure_all(self, points: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
        """Every (micro-batch, accumulation); after one that did not fit, no larger one. Returns the fastest."""
        limit, slower = float("inf"), 0
        before = points[0][0] if points else 0
        upwards = True
        for micro, accumulation in points:
            if (micro > before) != upwards and micro != before:
                upwards, slower = micro > before, 0
            before = micro
            if micro >= limit:
                reason = "a smaller one did not fit"
                self.emit("point", micro=micro, accumulation=accumulation, outcome="oom", reason=reason)
            elif slower == GIVE_UP:
                self.emit(
                    "point", micro=micro, accumulation=accumulation, outcome="slower", reason="the last ones were"
                )
            else:
                seconds = self.measure(micro, accumulation)
                limit = micro if seconds is None else limit
                slower = slower + 1 if seconds is not None and seconds > SLOWER * self.best else 0
        return self.fastest

    def measure(self, micro: int, accumulation: int) -> float | None:
        """One point: seconds a sample, ``None`` when it does not fit."""
        self._forget_shapes()
        fine, peak = self.fits(self.batch if self.worst is None else self.worst, micro, accumulation)
        if self.worst is not None:
            self._forget_shapes()
        if not fine:
            self.emit("point", micro=micro, accumulation=accumulation, outcome="oom", peak=peak, reason="out of memory")
            return None
        totals, updates = self._timed(resized(self.batch, micro), accumulation)
        found = summarise(totals)
        each = self._of_rank_0(found.median / micro / accumulation)
        if each < self.best:
            self.best, self.fastest = each, (micro, accumulation)
        kept = updates[found.warm_up :]
        self.emit(
            "point", micro=micro, accumulation=accumulation, outcome="ok", peak=peak, seconds=found.median,
            low=found.low, high=found.high, steps=found.steps, warm_up=found.warm_up,
            optimizer_seconds=sorted(kept)[len(kept) // 2], longest=self.worst is not None,
        )  # fmt: skip
        return each

    def _forget_shapes(self) -> None:
        """Compiled blocks see each size as if it were the first: a second shape would be compiled for all shapes."""
        if self.engine.compiler.compiled:
            torch.compiler.reset()

    def _timed(self, batch: Batch, accumulation: int) -> tuple[list[float], list[float]]:
        """Seconds of each step, and of the update in each."""
        totals: list[float] = []
        updates: list[float] = []
        end = time.monotonic() + self.request.point_seconds
        skipped = 0
        while True:
            clock = Clock(self.engine.device)
            applied = []
            clock.mark()
            for _ in range(min(ROUND, self.request.steps)):
                self.step(batch, accumulation, clock)
                applied.append(self.engine.was_step_applied())
            times = clock.read()
            skipped += applied.count(False)
            for index, good in enumerate(applied):
                if good or skipped > SKIPPED_AT_MOST:
                    updates.append(times[2 * index + 1])
                    totals.append(times[2 * index] + times[2 * index + 1])
                    self.emit("step", micro=batch.numel, accumulation=accumulation, seconds=totals[-1], kind="replay")
            if self._agreed(totals and self._enough(totals, batch.numel * accumulation, end)):
                return totals, updates

    def _enough(self, totals: list[float], numel: int, end: float) -> bool:
        found = summarise(totals)
        if len(totals) >= self.request.steps or time.monotonic() > end or found.low / numel > LOST * self.best:
            return True
        return len(totals) >= 2 * ROUND and found.precision <= self.request.precision

    def _agreed(self, done: Any) -> bool:
        """Rank 0's answer, on all ranks."""
        return bool(self._of_rank_0(float(bool(done))))

    def _of_rank_0(self, value: float) -> float:
        """Rank 0's value on all ranks: clocks differ, and what is done next must not."""
        tensor = torch.tensor([value], dtype=torch.float64, device=self.engine.device)
        collectives.broadcast(tensor, self.engine.axis, what="a time")
        return float(tensor)
