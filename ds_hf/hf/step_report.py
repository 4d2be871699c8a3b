"""``StepReportCallback``: the Trainer's logs get the figures that the autotuner's report shows, while training runs.

``step_seconds`` with its 95 % interval, ``samples_per_second``, ``peak_memory`` (bytes of this process's device, or of
the process where there is none), and, once it is known which configuration is in use, how that compares with what the
autotuner measured for it (``against_autotuned``; 1 is as fast).
"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import TrainerCallback

from ds_hf.errors import ConfigError
from ds_hf.measure.statistics import summarise
from ds_hf.printable import harmless
from ds_hf.regular_files import read_object

__all__ = ["StepReportCallback"]

REASONS = "ds_config.tuned.reasons.json"


class StepReportCallback(TrainerCallback):
    """Give it to ``Trainer(callbacks=[...])``. It never waits for the device.

    Args:
        results_dir: folder of a search, to compare with what it found.
    """

    def __init__(self, results_dir: str | Path | None = None) -> None:
        self.expected = _expected(Path(results_dir)) if results_dir is not None else None
        self._last: float | None = None
        self._seconds: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start anew."""
        self._last, self._seconds = None, []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the time since the last step: with a device that is behind, the mean over several is right."""
        now = time.perf_counter()
        if self._last is not None:
            self._seconds.append(now - self._last)
        self._last = now

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """An evaluation is no part of a step."""
        self._last = None

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Nor is saving."""
        self._last = None

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add the figures of the steps since the last log."""
        if logs is None or "loss" not in logs or not self._seconds:
            return
        found = summarise(self._seconds)
        self._seconds = []
        numel = args.train_batch_size * args.gradient_accumulation_steps * _reading_different_samples(args)
        figures: dict[str, float] = {
            "step_seconds": found.median,
            "step_seconds_low": found.low,
            "step_seconds_high": found.high,
            "samples_per_second": numel / found.median,
            "peak_memory": float(_peak()),
        }
        if self.expected is not None:
            figures["against_autotuned"] = figures["samples_per_second"] / self.expected
        logs.update(figures)
        if state.log_history and "loss" in state.log_history[-1]:
            state.log_history[-1].update(figures)


def _reading_different_samples(args: Any) -> int:
    """How many processes do: those that share the layers of a model, or its sequences, read the same ones."""
    if args.deepspeed_plugin is None:
        return int(args.world_size)
    from ds_hf.deepspeed_api import groups

    return groups.get_data_parallel_world_size()


def _peak() -> int:
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_reserved())
    return int(psutil.Process().memory_info().rss)


def _expected(folder: Path) -> float | None:
    """Samples a second that a search measured for its result."""
    path = folder / REASONS
    if not os.path.lexists(path):
        return None
    try:
        found = read_object(path)
        if found.get("metric") != "throughput":
            return None
        value = float(found["value"])
        if not 0 < value < math.inf:
            raise ValueError(f"{value:g} samples a second")
        return value
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError) as error:
        raise ConfigError(
            f"StepReportCallback: {path} is not what a search writes ({error!s:.200}); give the folder of one, or no "
            "results_dir"
        ) from harmless(error)
