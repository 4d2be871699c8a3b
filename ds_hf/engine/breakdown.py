"""Where the time of a micro-batch goes: ``wall_clock_breakdown``, ``memory_breakdown`` and ``flops_profiler``.

The engine is in a phase while it runs forward, backward or step. Times are taken with the device waited for at both
ends of a phase, so what would go on beside the next one is waited for: a run that asks for times is slower. Reductions
of gradients that run beside backward are in its ``bwd_inner``, and what is left of them in ``bwd_allreduce``; a
``loss.backward()`` of one's own, and evaluation, are not timed. Rank 0 speaks, on standard output; names are
DeepSpeed's.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch.distributed as dist
from torch import nn

from ds_hf.config.types import Config
from ds_hf.engine.accumulation import BatchSizes
from ds_hf.engine.comm.device import allocated_nbytes, peak_allocated_nbytes, synchronize
from ds_hf.engine.comm.mesh import Mesh
from ds_hf.engine.flops import FlopsProfiler
from ds_hf.engine.flops_text import StepTimes
from ds_hf.engine.monitor import MonitorMaster
from ds_hf.engine.zero.hooks import UnitHooks
from ds_hf.log import logger, say

__all__ = [
    "BACKWARD_GLOBAL_TIMER",
    "BACKWARD_INNER_GLOBAL_TIMER",
    "BACKWARD_INNER_MICRO_TIMER",
    "BACKWARD_MICRO_TIMER",
    "BACKWARD_REDUCE_GLOBAL_TIMER",
    "BACKWARD_REDUCE_MICRO_TIMER",
    "FORWARD_GLOBAL_TIMER",
    "FORWARD_MICRO_TIMER",
    "STEP_GLOBAL_TIMER",
    "STEP_MICRO_TIMER",
    "Breakdown",
    "NoBreakdown",
    "SynchronizedWallClockTimer",
    "WallClockTimer",
    "breakdown_of",
]


# -- timers, as DeepSpeed's ``utils.timer`` has them -------------------------------------------------------------------


class WallClockTimer:
    """Adds up the time between ``start`` and ``stop``, in milliseconds."""

    def __init__(self, name: str) -> None:
        self.name_ = name
        self.started_ = False
        self._since = 0.0
        self._msec = 0.0
        self._records: list[float] = []

    def start(self) -> None:
        """Wait for the device and begin.

        Raises:
            RuntimeError: it runs already.
        """
        if self.started_:
            raise RuntimeError(f"timer {self.name_!r} runs already")
        synchronize()
        self._since = time.perf_counter()
        self.started_ = True

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """Wait for the device and add the time since ``start``, or (``reset``) take it alone.

        Raises:
            RuntimeError: it does not run.
        """
        if not self.started_:
            raise RuntimeError(f"timer {self.name_!r} does not run")
        synchronize()
        passed = (time.perf_counter() - self._since) * 1e3
        self._msec = passed if reset else self._msec + passed
        if record:
            self._records.append(passed)
        self.started_ = False

    def reset(self) -> None:
        """Back to zero, and stopped."""
        self.started_ = False
        self._msec = 0.0
        self._records.clear()

    def elapsed(self, reset: bool = True) -> float:
        """Milliseconds so far; a timer that runs goes on."""
        runs = self.started_
        if runs:
            self.stop()
        found = self._msec
        if reset:
            self.reset()
        if runs:
            self.start()
        return found

    def mean(self) -> float:
        """Mean of the recorded times, without the slowest and fastest tenth."""
        if not self._records:
            return 0.0
        cut = len(self._records) // 10
        kept = sorted(self._records)[cut : len(self._records) - cut]
        return sum(kept) / len(kept)


class SynchronizedWallClockTimer:
    """Timers by name: ``timers("forward").start()``."""

    Timer = WallClockTimer

    def __init__(self) -> None:
        self.timers: dict[str, WallClockTimer] = {}

    def __call__(self, name: str) -> WallClockTimer:
        """The timer of this name."""
        return self.timers.setdefault(name, WallClockTimer(name))

    def get_timers(self) -> dict[str, WallClockTimer]:
        """All timers."""
        return self.timers

    def has_timer(self, name: str) -> bool:
        """Whether it was asked for before."""
        return name in self.timers

    @staticmethod
    def memory_usage() -> str:
        """What the device holds, as text."""
        gib = 2**30
        held, peak = allocated_nbytes() / gib, peak_allocated_nbytes() / gib
        return f"mem_allocated: {held:.4f} GB | max_mem_allocated: {peak:.4f} GB"

    def log(
        self,
        names: Iterable[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Log the times of ``names``, each divided by ``normalizer``, on the given ranks (default: 0)."""
        parts = [
            f"{name}: {self.timers[name].elapsed(reset=reset) / normalizer:.2f}"
            for name in names
            if name in self.timers
        ]
        rank = dist.get_rank() if dist.is_initialized() else 0
        if rank in ((0,) if ranks is None else ranks):
            memory = f" | {self.memory_usage()}" if memory_breakdown else ""
            logger.info("time (ms) | %s%s", " | ".join(parts), memory)

    def get_mean(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """Mean of the recorded times of ``names``."""
        means = {}
        for name in names:
            if name in self.timers:
                means[name] = self.timers[name].mean() / normalizer
                if reset:
                    self.timers[name].reset()
        return means


# -- the phases of an engine -------------------------------------------------------------------------------------------

_MICRO = "_microstep"  # behind a timer's name: of one micro-batch; without it of a whole step
# Timers by DeepSpeed's names of them.
FORWARD_GLOBAL_TIMER, FORWARD_MICRO_TIMER = "fwd", "fwd" + _MICRO
BACKWARD_GLOBAL_TIMER, BACKWARD_MICRO_TIMER = "bwd", "bwd" + _MICRO
BACKWARD_INNER_GLOBAL_TIMER, BACKWARD_INNER_MICRO_TIMER = "bwd_inner", "bwd_inner" + _MICRO
BACKWARD_REDUCE_GLOBAL_TIMER, BACKWARD_REDUCE_MICRO_TIMER = "bwd_allreduce", "bwd_allreduce" + _MICRO
STEP_GLOBAL_TIMER, STEP_MICRO_TIMER = "step", "step" + _MICRO
_TIMERS = {
    "forward": FORWARD_GLOBAL_TIMER,
    "backward": BACKWARD_GLOBAL_TIMER,
    "backward_inner": BACKWARD_INNER_GLOBAL_TIMER,  # until the gradients are there
    "backward_allreduce": BACKWARD_REDUCE_GLOBAL_TIMER,  # from then on: reductions that did not run beside it
    "step": STEP_GLOBAL_TIMER,
}


class Phased(Protocol):
    """The engine as its phases see it."""

    module: nn.Module
    training: bool
    settings: Config
    mesh: Mesh
    monitor: MonitorMaster
    breakdown: NoBreakdown
    hooks: UnitHooks
    batch: BatchSizes
    global_steps: int
    global_samples: int


class NoBreakdown:
    """Without any of the settings: phases cost nothing.

    Attributes:
        on: the engine says when it is in a phase.
        latest: milliseconds of the latest micro-batch and step, by timer.
        timers: those of the phases, and the user's own.
    """

    on = False

    def __init__(self) -> None:
        self.latest: dict[str, float] = {}
        self.timers = SynchronizedWallClockTimer()


_NOTHING = nullcontext()


class Breakdown(NoBreakdown):
    """Times the phases of ``engine``, and counts the operations of one forward."""

    on = True

    def __init__(self, engine: Phased) -> None:
        super().__init__()
        settings = engine.settings
        self._engine = weakref.ref(engine)
        self._flops = settings.flops_profiler
        self._times = settings.wall_clock_breakdown or self._flops.enabled  # DeepSpeed: the one switches the other on
        self._memory = settings.memory_breakdown
        self._profiler: FlopsProfiler | None = None
        if self._flops.enabled and engine.mesh.world.rank == 0:
            self._profiler = FlopsProfiler(engine.module, None, self._flops.recompute_fwd_factor)

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """The engine is in the phase ``forward``, ``backward`` or ``step``."""
        engine = self._engine()
        if engine is None or (name == "forward" and not engine.training):
            return _NOTHING
        return self._phase(engine, name)

    @contextmanager
    def _phase(self, engine: Phased, name: str) -> Iterator[None]:
        steps = engine.global_steps
        profiler = self._profiler if steps == self._flops.profile_step else None
        timers = [self.timers(_TIMERS[name] + kind) for kind in (_MICRO, "")] if self._times else []
        self._say_memory(engine, f"before {name}")
        if profiler is not None and name == "forward":
            profiler.start_profile()
        for timer in timers:
            timer.start()
        try:
            with self._divided(engine) if timers and name == "backward" else _NOTHING:
                yield
        finally:
            for timer in timers:
                timer.stop()
            if profiler is not None and name == "forward":
                profiler.stop_profile()
        self._say_memory(engine, f"after {name}")
        if name == "step":
            self._end_micro_batch(engine, whole=engine.global_steps > steps)

    @contextmanager
    def _divided(self, engine: Phased) -> Iterator[None]:
        """Backward until its gradients are there, and what is left of their reduction. A pipeline's backward has one of
        each for every micro-batch."""
        inner, rest = (
            [self.timers(_TIMERS[f"backward_{part}"] + kind) for kind in (_MICRO, "")]
            for part in ("inner", "allreduce")
        )
        hooks = engine.hooks
        flush, own = hooks.flush, vars(hooks).get("flush")

        def timed() -> None:
            for timer in inner:
                timer.stop()
            for timer in rest:
                timer.start()
            try:
                flush()
            finally:
                for timer in rest:
                    timer.stop()

        hooks.flush = timed  # type: ignore[method-assign]  # this object's alone, and for this backward
        for timer in inner:
            timer.start()
        try:
            yield
        finally:
            del hooks.flush
            if own is not None:
                hooks.flush = own  # type: ignore[method-assign]
            for timer in inner:
                if timer.started_:
                    timer.stop()

    def _say_memory(self, engine: Phased, when: str) -> None:
        if self._memory and engine.mesh.world.rank == 0:
            say(f"{when}: {self.timers.memory_usage()}")

    def _end_micro_batch(self, engine: Phased, *, whole: bool) -> None:
        if self._times:
            self._say_times(engine, _MICRO)
            if whole:
                self._say_times(engine, "")
                self._tell_monitor(engine)
        if whole and self._profiler is not None and self._profiler.started:
            flops = self._flops
            self._profiler.times = self._step_times(engine)
            self._profiler.print_model_profile(
                flops.profile_step, flops.module_depth, flops.top_modules, flops.detailed, flops.output_file
            )
            self._profiler.end_profile()

    def _step_times(self, engine: Phased) -> StepTimes:
        """For the flops profile: of the last micro-batch and the update."""
        shape = engine.mesh.shape
        return StepTimes(
            backward=self.latest["bwd" + _MICRO] / 1e3,
            step=self.latest["step" + _MICRO] / 1e3,
            micro_batch=engine.batch.micro,
            world_size=engine.mesh.world.world_size,
            data_parallel=shape.data,
            model_parallel=shape.tensor * shape.pipe,
            recompute=self._flops.recompute_fwd_factor,
        )

    def _say_times(self, engine: Phased, kind: str) -> None:
        found = {name + kind: self.timers(name + kind).elapsed() for name in _TIMERS.values()}
        self.latest.update(found)
        if engine.mesh.world.rank == 0:
            say("time (ms) | " + " | ".join(f"{name}: {value:.2f}" for name, value in found.items()))

    def _tell_monitor(self, engine: Phased) -> None:
        if engine.monitor.enabled and engine.mesh.world.rank == 0:
            events = [
                (f"Train/Samples/elapsed_time_ms_{name}", self.latest[timer], engine.global_samples)
                for name, timer in _TIMERS.items()
            ]
            engine.monitor.write_events(events)


def breakdown_of(engine: Phased) -> NoBreakdown:
    """What the engine's settings ask for."""
    settings = engine.settings
    asked = settings.wall_clock_breakdown or settings.memory_breakdown or settings.flops_profiler.enabled
    return Breakdown(engine) if asked else NoBreakdown()
