"""Timers that wait for the device, as DeepSpeed's ``utils.timer`` has them, and the names of those of an engine."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import torch.distributed as dist

from ds_hf.engine.comm.device import allocated_nbytes, peak_allocated_nbytes, synchronize
from ds_hf.log import logger

__all__ = [
    "BACKWARD_GLOBAL_TIMER",
    "BACKWARD_INNER_GLOBAL_TIMER",
    "BACKWARD_INNER_MICRO_TIMER",
    "BACKWARD_MICRO_TIMER",
    "BACKWARD_REDUCE_GLOBAL_TIMER",
    "BACKWARD_REDUCE_MICRO_TIMER",
    "FORWARD_GLOBAL_TIMER",
    "FORWARD_MICRO_TIMER",
    "MICRO",
    "STEP_GLOBAL_TIMER",
    "STEP_MICRO_TIMER",
    "SynchronizedWallClockTimer",
    "WallClockTimer",
]

MICRO = "_microstep"  # behind a timer's name: of one micro-batch; without it of a whole step
# Timers by DeepSpeed's names of them.
FORWARD_GLOBAL_TIMER, FORWARD_MICRO_TIMER = "fwd", "fwd" + MICRO
BACKWARD_GLOBAL_TIMER, BACKWARD_MICRO_TIMER = "bwd", "bwd" + MICRO
BACKWARD_INNER_GLOBAL_TIMER, BACKWARD_INNER_MICRO_TIMER = "bwd_inner", "bwd_inner" + MICRO
BACKWARD_REDUCE_GLOBAL_TIMER, BACKWARD_REDUCE_MICRO_TIMER = "bwd_allreduce", "bwd_allreduce" + MICRO
STEP_GLOBAL_TIMER, STEP_MICRO_TIMER = "step", "step" + MICRO


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
