"""The two ways of counting a warm-up and the decay after it: DeepSpeed's, and one without its oddities.

``t`` is a schedule's ``last_batch_iteration``: what follows from t is in force for update t + 1 (0-based).
"""

from __future__ import annotations

import math
from typing import Protocol

__all__ = ["DeepSpeedRamp", "Ramp", "StrictRamp"]


class Ramp(Protocol):
    """Where the schedule stands at counter t; chosen by the mode at construction."""

    def warming(self, t: int) -> bool: ...
    def fraction(self, t: int) -> float:
        """How much of the warm-up is done."""

    def left(self, t: int, total: int) -> float:
        """What is left of a linear decay."""

    def progress(self, t: int, total: int) -> float:
        """How much of a cosine decay is done."""


class DeepSpeedRamp:
    """DeepSpeed's counting: updates 0 and 1 both stand at the start of the warm-up."""

    def __init__(self, num_steps: int, log: bool) -> None:
        self.num_steps = max(2, num_steps)
        self.log = log
        self._inverse_log = 1.0 / math.log(self.num_steps)

    def warming(self, t: int) -> bool:
        return t < self.num_steps

    def fraction(self, t: int) -> float:
        if t < 0:
            return 0.0
        return self._inverse_log * math.log(t + 1) if self.log else t / self.num_steps

    def left(self, t: int, total: int) -> float:
        return max(0.0, (total - t) / max(1.0, total - self.num_steps))

    def progress(self, t: int, total: int) -> float:
        return min(1.0, (t - self.num_steps + 1) / max(1, total - self.num_steps))


class StrictRamp:
    """Update k = t + 1 of a warm-up of n updates runs at (k + 1)/n of the peak, so the last of them is the peak."""

    def __init__(self, num_steps: int, log: bool) -> None:
        self.num_steps = max(1, num_steps)
        self.log = log

    def warming(self, t: int) -> bool:
        return t + 1 < self.num_steps

    def fraction(self, t: int) -> float:
        return math.log(t + 3) / math.log(self.num_steps + 1) if self.log else (t + 2) / self.num_steps

    def left(self, t: int, total: int) -> float:
        return max(0.0, (total - (t + 1)) / max(1, total - self.num_steps + 1))

    def progress(self, t: int, total: int) -> float:
        return min(1.0, (t + 2 - self.num_steps) / max(1, total - self.num_steps))
