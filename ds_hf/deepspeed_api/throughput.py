"""Samples in a second: DeepSpeed's ``utils.timer.ThroughputTimer``."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ds_hf.engine.comm.device import synchronize
from ds_hf.engine.observe.timers import SynchronizedWallClockTimer
from ds_hf.log import logger

__all__ = ["ThroughputTimer"]


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
            synchronize()
        return time.perf_counter()
