"""From curves to learning rates: the rules people know, the stability limit, and the interval worth trying.

``steepest`` is PyTorch Lightning's rule and ``valley`` fastai's, on the curve they would see (each smooths the training
loss with a moving average and ends at four times the best), so that they can be compared with what ds_hf suggests.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ds_hf.lr.curves import Curve, Sweep, mean_curve

__all__ = ["Landmarks", "landmarks", "moving_average", "steepest", "valley"]

RISEN = 0.1  # of what the loss had fallen: the curve has turned
FALLEN = 0.05  # of what the loss will fall: learning has begun
OTHERS_STOP = 4.0  # times the best smoothed loss, where fastai and Lightning end their sweeps


@dataclass(frozen=True)
class Landmarks:
    """What the averaged curve shows.

    Attributes:
        low: where the loss begins to fall.
        best: where the held-out loss is lowest; training that long at this rate is already too much for some models.
        limit: where it has turned, or training diverged; the largest rate tested if neither happened.
        bounded: whether ``limit`` was found and is not just the end of the sweep.
        steepest, valley: what Lightning and fastai would suggest, ``None`` where their rules find nothing.
        fallen: by how much the loss fell from its start.
    """

    low: float
    best: float
    limit: float
    bounded: bool
    steepest: float | None
    valley: float | None
    fallen: float


def landmarks(sweeps: Sequence[Sweep]) -> Landmarks:
    """Read the curves of at least one sweep.

    Raises:
        ValueError: there are fewer than three finite losses: training diverged at once, or the sweep is too short.
    """
    measured = mean_curve(sweeps, held_out=True)
    if len(measured) < 3:
        measured = mean_curve(sweeps, held_out=False)
    if len(measured) < 3:
        raise ValueError(
            "the range test has fewer than three finite losses: training diverges at the smallest learning rate. "
            "Start lower (min_lr), or look at the data and the model first"
        )
    curve = measured.smooth()
    start, at = float(curve.losses[0]), int(curve.losses.argmin())
    fallen = max(start - float(curve.losses[at]), 0.0)
    ended = [sweep.diverged_at for sweep in sweeps if sweep.diverged_at is not None]
    risen = np.flatnonzero(curve.losses[at:] > curve.losses[at] + max(RISEN * fallen, 1e-3 * abs(start)))
    ends = ended + ([float(curve.lrs[at + risen[0]])] if len(risen) else [])
    limit = min(ends) if ends else float(curve.lrs[-1])
    low = float(curve.lrs[int(np.argmax(curve.losses <= start - FALLEN * fallen))])
    best = min(float(curve.lrs[at]), limit)
    others = mean_curve(sweeps, held_out=False)
    lrs, losses = _as_others_see_it(others)
    return Landmarks(min(low, best), best, limit, bool(ends), steepest(lrs, losses), valley(lrs, losses), fallen)


def moving_average(losses: Sequence[float], beta: float = 0.98) -> list[float]:
    """Exponential, with its start corrected."""
    mean, smooth = 0.0, []
    for index, loss in enumerate(losses, 1):
        mean = beta * mean + (1 - beta) * loss
        smooth.append(mean / (1 - beta**index))
    return smooth


def _as_others_see_it(curve: Curve) -> tuple[list[float], list[float]]:
    """Learning rates and smoothed losses up to where fastai and Lightning stop."""
    smooth = moving_average([float(loss) for loss in curve.losses])
    best, end = float("inf"), len(smooth)
    for index, loss in enumerate(smooth):
        if index > 1 and loss > OTHERS_STOP * best:
            end = index + 1
            break
        best = min(best, loss)
    return [float(lr) for lr in curve.lrs[:end]], smooth[:end]


def steepest(lrs: Sequence[float], losses: Sequence[float], skip_begin: int = 10, skip_end: int = 1) -> float | None:
    """Where the loss falls fastest from one update to the next (Lightning's rule, with its two margins)."""
    inside = losses[skip_begin : len(losses) - skip_end]
    if len(inside) < 2:
        return None
    return lrs[skip_begin + int(np.gradient(np.asarray(inside)).argmin())]


def valley(lrs: Sequence[float], losses: Sequence[float], skip_end: int = 5) -> float | None:
    """About half-way down the longest falling stretch (fastai's rule: the longest decreasing subsequence)."""
    first = len(losses) // 10
    inside = list(losses[first : len(losses) - skip_end])
    if len(inside) < 4:
        return None
    end, length = _longest_decrease(inside)
    third = length / 3
    return lrs[first + max(end - length, 0) + int(third) + int(third / 2)]


def _longest_decrease(losses: Sequence[float]) -> tuple[int, int]:
    """Index of the first element that ends a longest strictly decreasing subsequence, and its length."""
    tails: list[float] = []  # of subsequences of length 1, 2, ..., negated, so that they ascend
    best, end = 0, 0
    for index, loss in enumerate(losses):
        place = bisect_left(tails, -loss)
        if place == len(tails):
            tails.append(-loss)
        else:
            tails[place] = -loss
        if place + 1 > best:
            best, end = place + 1, index
    return end, best
