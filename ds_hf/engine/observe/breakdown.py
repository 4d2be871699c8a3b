"""Where the time of a micro-batch goes: ``wall_clock_breakdown``, ``memory_breakdown`` and ``flops_profiler``.

The engine is in a phase while it runs forward, backward or step. Times are taken with the device waited for at both
ends of a phase, so what would go on beside the next one is waited for: a run that asks for times is slower. Reductions
of gradients that run beside backward are in its ``bwd_inner``, and what is left of them in ``bwd_allreduce``; a
``loss.backward()`` of one's own, and evaluation, are not timed. Rank 0 speaks, on standard output; names are
DeepSpeed's.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from torch import nn

from ds_hf.config.types import Config
from ds_hf.engine.accumulation import BatchSizes
from ds_hf.engine.comm.mesh import Mesh
from ds_hf.engine.events import Observer, Phase
from ds_hf.engine.observe.flops import FlopsProfiler
from ds_hf.engine.observe.flops_text import StepTimes
from ds_hf.engine.observe.monitor import MonitorMaster
from ds_hf.engine.observe.timers import (
    BACKWARD_GLOBAL_TIMER,
    BACKWARD_INNER_GLOBAL_TIMER,
    BACKWARD_REDUCE_GLOBAL_TIMER,
    FORWARD_GLOBAL_TIMER,
    MICRO,
    STEP_GLOBAL_TIMER,
    SynchronizedWallClockTimer,
    WallClockTimer,
)
from ds_hf.log import say

__all__ = ["Breakdown", "attach"]


# -- the phases of an engine -------------------------------------------------------------------------------------------

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
    batch: BatchSizes
    global_steps: int
    global_samples: int


class Breakdown(Observer):
    """Times the phases of ``engine``, and counts the operations of one forward.

    Attributes:
        latest: milliseconds of the latest micro-batch and step, by timer.
        timers: those of the phases, and the user's own.
    """

    def __init__(self, engine: Phased) -> None:
        settings = engine.settings
        self.latest: dict[str, float] = {}
        self.timers = SynchronizedWallClockTimer()
        self._engine = weakref.ref(engine)
        self._flops = settings.flops_profiler
        self._times = settings.wall_clock_breakdown or self._flops.enabled  # DeepSpeed: the one switches the other on
        self._memory = settings.memory_breakdown
        self._profiler: FlopsProfiler | None = None
        if self._flops.enabled and engine.mesh.world.rank == 0:
            self._profiler = FlopsProfiler(engine.module, None, self._flops.recompute_fwd_factor)

    def on_phase(
        self, name: Phase, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> AbstractContextManager[None] | None:
        """Of training: forward, backward with its end, and step."""
        engine = self._engine()
        if engine is None or (name == "forward" and not engine.training):
            return None
        if name == "flush":
            return self._rest()
        return self._timed(engine, name) if name in ("forward", "backward", "step") else None

    @contextmanager
    def _timed(self, engine: Phased, name: str) -> Iterator[None]:
        steps = engine.global_steps
        profiler = self._profiler if steps == self._flops.profile_step else None
        timers = self._both(name)
        inner = self._both("backward_inner") if name == "backward" else []
        self._say_memory(engine, f"before {name}")
        if profiler is not None and name == "forward":
            profiler.start_profile()
        for timer in timers + inner:
            timer.start()
        try:
            yield
        finally:
            for timer in [*(timer for timer in inner if timer.started_), *timers]:
                timer.stop()
            if profiler is not None and name == "forward":
                profiler.stop_profile()
        self._say_memory(engine, f"after {name}")
        if name == "step":
            self._end_micro_batch(engine, whole=engine.global_steps > steps)

    @contextmanager
    def _rest(self) -> Iterator[None]:
        """The gradients of a backward are there: what is left of their reduction. A pipeline's backward has one for
        every micro-batch; one of the script's own is not timed."""
        inner = [timer for timer in self._both("backward_inner") if timer.started_]
        rest = self._both("backward_allreduce") if inner else []
        for timer in inner:
            timer.stop()
        for timer in rest:
            timer.start()
        try:
            yield
        finally:
            for timer in rest:
                timer.stop()

    def _both(self, name: str) -> list[WallClockTimer]:
        """The timers of a micro-batch and of a step."""
        return [self.timers(_TIMERS[name] + kind) for kind in (MICRO, "")] if self._times else []

    def _say_memory(self, engine: Phased, when: str) -> None:
        if self._memory and engine.mesh.world.rank == 0:
            say(f"{when}: {self.timers.memory_usage()}")

    def _end_micro_batch(self, engine: Phased, *, whole: bool) -> None:
        if self._times:
            self._say_times(engine, MICRO)
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
            backward=self.latest["bwd" + MICRO] / 1e3,
            step=self.latest["step" + MICRO] / 1e3,
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


def attach(engine: Any) -> None:
    """Watch the phases of ``engine``."""
    engine.events.add(Breakdown(engine))
