"""Where the time of a micro-batch goes: ``wall_clock_breakdown``, ``memory_breakdown`` and ``flops_profiler``.

The engine is in a phase while it runs forward, backward or step. Times are taken with the device waited for at both
ends of a phase, so what would go on beside the next one is waited for: a run that asks for times is slower. Reductions
of gradients are in the time of the backward that they run beside; a ``loss.backward()`` of one's own, and evaluation,
are not timed. Rank 0 speaks, on standard output; names are DeepSpeed's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ds_hf.engine.flops import FlopsProfiler
from ds_hf.log import say

if TYPE_CHECKING:
    from ds_hf.engine.engine import Engine

__all__ = ["Breakdown", "NoBreakdown", "breakdown_of", "phase"]

F = TypeVar("F", bound=Callable[..., Any])

_TIMERS = {"forward": "fwd", "backward": "bwd", "step": "step"}
_MICRO = "_microstep"  # behind a timer's name: of one micro-batch; without it of a whole step


class NoBreakdown:
    """Nobody asked: phases cost nothing.

    Attributes:
        latest: milliseconds of the latest micro-batch and step, by timer.
    """

    def __init__(self) -> None:
        self.latest: dict[str, float] = {}

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """The engine is in the phase ``forward``, ``backward`` or ``step``."""
        return _NOTHING


_NOTHING = nullcontext()


class Breakdown(NoBreakdown):
    """Times the phases of ``engine``, and counts the operations of one forward."""

    def __init__(self, engine: Engine) -> None:
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
        engine = self._engine()
        if engine is None or (name == "forward" and not engine.training):
            return _NOTHING
        return self._phase(engine, name)

    @contextmanager
    def _phase(self, engine: Engine, name: str) -> Iterator[None]:
        steps = engine.global_steps
        profiler = self._profiler if steps == self._flops.profile_step else None
        timers = [engine.timers(_TIMERS[name] + kind) for kind in (_MICRO, "")] if self._times else []
        self._say_memory(engine, f"before {name}")
        if profiler is not None and name == "forward":
            profiler.start_profile()
        for timer in timers:
            timer.start()
        try:
            yield
        finally:
            for timer in timers:
                timer.stop()
            if profiler is not None and name == "forward":
                profiler.stop_profile()
        self._say_memory(engine, f"after {name}")
        if name == "step":
            self._end_micro_batch(engine, whole=engine.global_steps > steps)

    def _say_memory(self, engine: Engine, when: str) -> None:
        if self._memory and engine.mesh.world.rank == 0:
            say(f"{when}: {engine.timers.memory_usage()}")

    def _end_micro_batch(self, engine: Engine, *, whole: bool) -> None:
        if self._times:
            self._say_times(engine, _MICRO)
            if whole:
                self._say_times(engine, "")
                self._tell_monitor(engine)
        if whole and self._profiler is not None and self._profiler.started:
            flops = self._flops
            self._profiler.print_model_profile(
                flops.profile_step, flops.module_depth, flops.top_modules, flops.detailed, flops.output_file
            )
            self._profiler.end_profile()

    def _say_times(self, engine: Engine, kind: str) -> None:
        found = {name + kind: engine.timers(name + kind).elapsed() for name in _TIMERS.values()}
        self.latest.update(found)
        if engine.mesh.world.rank == 0:
            say("time (ms) | " + " | ".join(f"{name}: {value:.2f}" for name, value in found.items()))

    def _tell_monitor(self, engine: Engine) -> None:
        if engine.monitor.enabled and engine.mesh.world.rank == 0:
            events = [
                (f"Train/Samples/elapsed_time_ms_{name}", self.latest[timer], engine.global_samples)
                for name, timer in _TIMERS.items()
            ]
            engine.monitor.write_events(events)


def breakdown_of(engine: Engine) -> NoBreakdown:
    """What the engine's settings ask for."""
    settings = engine.settings
    asked = settings.wall_clock_breakdown or settings.memory_breakdown or settings.flops_profiler.enabled
    return Breakdown(engine) if asked else NoBreakdown()


def phase(name: str) -> Callable[[F], F]:
    """A method of the engine is one of its phases."""

    def decorate(method: F) -> F:
        @wraps(method)
        def run(self: Engine, *args: Any, **kwargs: Any) -> Any:
            with self.breakdown(name):
                return method(self, *args, **kwargs)

        return cast(F, run)

    return decorate
