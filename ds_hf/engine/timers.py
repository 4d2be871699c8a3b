"""Named timers of wall time that wait for the device, and samples in a second: DeepSpeed's ``utils.timer``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.distributed as dist

from ds_hf.engine.dist.accelerator import get_accelerator
from ds_hf.log import logger

__all__ = ["SynchronizedWallClockTimer", "ThroughputTimer", "WallClockTimer"]


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
        get_accelerator().synchronize()
        self._since = time.perf_counter()
        self.started_ = True

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """Wait for the device and add the time since ``start``, or (``reset``) take it alone.

        Raises:
            RuntimeError: it does not run.
        """
        if not self.started_:
            raise RuntimeError(f"timer {self.name_!r} does not run")
        get_accelerator().synchronize()
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
        device, gib = get_accelerator(), 2**30
        held, peak = device.memory_allocated() / gib, device.max_memory_allocated() / gib
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


class ThroughputTimer:
    """Samples in a second, from the step ``start_step`` on.

    Args:
        config: object with ``enabled`` and ``synchronized``; None means both.
        batch_size: samples of one global step.
        steps_per_output: report every so many steps; None: never.

    Raises:
        ValueError: ``steps_per_output`` is not a whole number from 1.
    """

    def __init__(
        self,
        config: Any = None,
        batch_size: int = 1,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], None] | None = None,
    ) -> None:
        if steps_per_output is not None and (steps_per_output < 1 or steps_per_output != int(steps_per_output)):
            raise ValueError(f"steps_per_output must be a whole number from 1, or None, got {steps_per_output}")
        self.enabled = bool(getattr(config, "enabled", True))
        self.synchronized = bool(getattr(config, "synchronized", True))
        self.batch_size = max(1, batch_size)
        self.start_step, self.steps_per_output, self.monitor_memory = start_step, steps_per_output, monitor_memory
        self.logging = logging_fn or logger.info
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.total_elapsed_time = self.step_elapsed_time = 0.0
        self.initialized = self.started = False
        self.start_time = self.end_time = 0.0

    def update_epoch_count(self) -> None:
        """A new epoch begins."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """A micro-batch begins."""
        if not self.enabled:
            return
        self.initialized = self.started = True
        if self.global_step_count >= self.start_step:
            self.start_time = self._now()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """A micro-batch ends, and with ``global_step`` a whole step; nothing happens without a ``start()``."""
        if not self.enabled or not self.started:
            return
        self.started = False
        self.micro_step_count += 1
        self.global_step_count += global_step
        if not self.start_time:
            return
        self.end_time = self._now()
        passed = self.end_time - self.start_time
        self.total_elapsed_time += passed
        self.step_elapsed_time += passed
        if global_step:
            if report_speed and self.steps_per_output and self.global_step_count % self.steps_per_output == 0:
                self._report()
            self.step_elapsed_time = 0.0

    def avg_samples_per_sec(self) -> float:
        """Mean over the measured steps; minus infinity before there is one."""
        steps = self.global_step_count - self.start_step
        if steps <= 0 or self.total_elapsed_time == 0:
            return float("-inf")
        return self.batch_size * steps / self.total_elapsed_time

    def _report(self) -> None:
        current = self.batch_size / self.step_elapsed_time
        memory = f", {SynchronizedWallClockTimer.memory_usage()}" if self.monitor_memory else ""
        self.logging(
            f"epoch={self.epoch_count} micro_step={self.micro_step_count} global_step={self.global_step_count} "
            f"samples/sec: {current:.2f} now, {self.avg_samples_per_sec():.2f} on average{memory}"
        )

    def _now(self) -> float:
        if self.synchronized:
            get_accelerator().synchronize()
        return time.perf_counter()
