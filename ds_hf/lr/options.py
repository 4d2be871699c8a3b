"""What a user can set of a learning-rate search; one value for the command line, the library and the callback."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["LrOptions"]


@dataclass(frozen=True)
class LrOptions:
    """Options of a search. All counts are of optimizer updates or of batches of one update (accumulation included).

    Attributes:
        min_lr, max_lr: ends of the sweep.
        num_steps: updates of one sweep.
        mode: "exp" (equal ratios) or "linear" (equal differences, as DeepSpeed's LRRangeTest).
        staircase: updates before the rate grows; 1 for growth at every update.
        seeds: sweeps, each with another order of the batches and other random numbers in the model.
        moment_steps: updates at ``min_lr`` before a sweep, so that the moments of Adam are warm; not before runs,
            which begin with a warm-up.
        train_batches: batches kept and used again, in other orders.
        held_out_batches: batches set aside; runs are judged by all of them, sweeps by a quarter.
        held_out_every: updates between two looks at these during a sweep.
        stop_factor: a sweep ends when the smoothed loss stands above its start by this part of what it had fallen.
        confirm_steps: updates of a short confirming run, the longer ones have twice as many; 0 for none.
        total_steps: updates of the training to come: shapes the schedules, and longer ones get a lower rate.
        seed: of everything random.
    """

    min_lr: float = 1e-6
    max_lr: float = 10.0
    num_steps: int = 100
    mode: Literal["exp", "linear"] = "exp"
    staircase: int = 1
    seeds: int = 2
    moment_steps: int = 5
    train_batches: int = 64
    held_out_batches: int = 16
    held_out_every: int = 4
    stop_factor: float = 0.5
    confirm_steps: int = 60
    total_steps: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        counts = ("staircase", "seeds", "train_batches", "held_out_batches", "held_out_every")
        least = {"num_steps": 10, "moment_steps": 0, "confirm_steps": 0, **dict.fromkeys(counts, 1)}
        for name, low in least.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise ValueError(f"{name} must be a whole number of at least {low}, got {value!r}")
        if not (math.isfinite(self.max_lr) and 0 < self.min_lr < self.max_lr):
            raise ValueError(f"0 < min_lr < max_lr is needed, got min_lr {self.min_lr} and max_lr {self.max_lr}")
        if self.mode not in ("exp", "linear"):
            raise ValueError(f'mode must be "exp" or "linear", got {self.mode!r}')
        if not self.stop_factor > 0:
            raise ValueError(f"stop_factor must be positive, got {self.stop_factor}")
        if self.total_steps is not None and self.total_steps < 1:
            raise ValueError(f"total_steps must be positive, got {self.total_steps}")

    def sweep_lr(self, step: int) -> float:
        """Learning rate of the update ``step`` (0-based) of a sweep."""
        stairs = (self.num_steps - 1) // self.staircase
        part = (step // self.staircase) / max(stairs, 1)
        if self.mode == "linear":
            return self.min_lr + (self.max_lr - self.min_lr) * part
        return self.min_lr * (self.max_lr / self.min_lr) ** part  # type: ignore[no-any-return]

    @property
    def batches(self) -> int:
        """Batches that a search needs, each for one update."""
        return self.train_batches + self.held_out_batches

    def to_dict(self) -> dict[str, Any]:
        """For JSON; ``LrOptions(**values)`` is the way back."""
        return asdict(self)
