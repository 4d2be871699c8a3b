"""From step times to one figure with its uncertainty: warm-up cut off, median, confidence interval.

The interval is that of order statistics (distribution-free, Conover 1999, 3.2): step times are skewed and have
outliers, which a normal interval would take for noise everywhere. With fewer than six values no such interval reaches
95 %, so the whole range is given.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Summary", "quantile_ranks", "summarise", "warm_up_length"]

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Summary:
    """Seconds of a step.

    Attributes:
        median: of the steps after the warm-up. low, high: 95 % confidence interval of the median.
        steps: how many steps count. warm_up: how many before them do not.
    """

    median: float
    low: float
    high: float
    steps: int
    warm_up: int

    @property
    def precision(self) -> float:
        """Half the width of the interval, relative to the median."""
        return (self.high - self.low) / 2 / self.median if self.median else math.inf


def warm_up_length(values: Sequence[float]) -> int:
    """Leading values to leave out: the cut that makes the standard error of the rest least (MSER, White 1997).

    At most half of them; only values slower than the rest are warm-up.
    """
    best, cut = math.inf, 0
    for start in range(len(values) // 2 + 1):
        rest = values[start:]
        if len(rest) < 2:
            break
        error = statistics.pvariance(rest) / len(rest)
        if error < best * (1 - 1e-9):
            best, cut = error, start
    typical = statistics.median(values[cut:]) if values else 0.0
    while cut and values[cut - 1] <= typical:
        cut -= 1
    return cut


def quantile_ranks(count: int) -> tuple[int, int]:
    """0-based ranks between which the median lies with 95 % confidence; the extremes where that cannot be had."""
    low = 0
    tail = 0.5**count
    for rank in range(count // 2):
        if 2 * tail > 1 - CONFIDENCE:
            break
        low = rank
        tail += math.comb(count, rank + 1) * 0.5**count
    return low, count - 1 - low


def summarise(values: Sequence[float]) -> Summary:
    """Summary of the times of consecutive steps.

    Raises:
        ValueError: there are none.
    """
    if not values:
        raise ValueError("no step was measured")
    cut = warm_up_length(values)
    rest = sorted(values[cut:])
    low, high = quantile_ranks(len(rest))
    return Summary(statistics.median(rest), rest[low], rest[high], len(rest), cut)
