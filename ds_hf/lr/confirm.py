"""Short trainings at a few learning rates decide; this module says which ones come next, and which rate wins.

A range test alone is not enough: it tells where training breaks, while the best rate for a whole training lies
somewhere below, by a factor that depends on the model, the optimizer and the data. ``decide`` is a conversation: it
yields a ``PlannedRun``, is sent what came of it, and returns the ``Decision``.

1. A ladder of rates, half a decade apart, downwards from the limit of stability; it goes on until its lower end is
   clearly worse than the best, since a plateau at a high rate may hide a better place below.
2. Around the best rung, steps of a quarter decade, with trainings ``FINE`` times as long, for every seed.
3. A parabola through the three rates around the best of these, over the logarithm of the rate; its lowest point wins.
4. Longer trainings want lower rates: with the length known, the rate falls with it to the power ``HORIZON``, which
   Bjorck et al. (2024, "Scaling Optimal LR Across Token Horizons") measured for language models. Not where the next
   higher rate diverges: what stability allows does not depend on the length.

A run is a training in small: a warm-up, then a decay to zero. Rates that only win before the decay do not win here.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ds_hf.lr.rules import Landmarks

__all__ = ["Decision", "PlannedRun", "RunResult", "decide", "run_lr", "so_far"]

RUNG = 10**0.5
STEP = 10**0.25
FINE = 2
RUNGS = 4  # of the ladder, before it is extended
MORE = 6  # rates by which either search may be extended
WARMUP = 0.1  # of a run
NEAR = 0.02  # of the best loss: as good
CLEARLY = 0.04  # above the best loss: worse, whatever the noise of one short run
HORIZON = -0.32


@dataclass(frozen=True)
class PlannedRun:
    """A training to be made: ``steps`` updates with peak ``lr``, from the same start as all others."""

    lr: float
    steps: int
    seed: int


@dataclass(frozen=True)
class RunResult:
    """What came of it: the held-out loss at its end, infinite when it diverged."""

    run: PlannedRun
    loss: float

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self.run), "loss": self.loss if math.isfinite(self.loss) else None}


@dataclass(frozen=True)
class Decision:
    """Attributes:
    lr: suggested peak learning rate.
    low, high: rates around it that did nearly as well, or ``lr`` itself.
    reason: one sentence.
    """

    lr: float
    low: float
    high: float
    reason: str


Conversation = Generator[PlannedRun, float, Decision]


def run_lr(run: PlannedRun, step: int) -> float:
    """Learning rate of the update ``step`` (0-based) of a run: a linear warm-up, then a linear decay towards zero."""
    warm = max(1, round(WARMUP * run.steps))
    if step < warm:
        return run.lr * (step + 1) / warm
    return run.lr * (run.steps - step) / (run.steps - warm + 1)


def decide(marks: Landmarks, steps: int, seeds: Iterable[int], total_steps: int | None = None) -> Conversation:
    """Ask for runs and decide.

    Args:
        marks: of the range test.
        steps: updates of a run of the ladder.
        seeds: orders of the data for the longer runs; the ladder takes the first.
        total_steps: updates of the training to come, if known.

    Raises:
        ValueError: every run diverged.
    """
    seeds = list(seeds)
    coarse: dict[float, float] = {}
    for rung in range(RUNGS):
        lr = marks.limit / RUNG**rung
        coarse[lr] = yield PlannedRun(lr, steps, seeds[0])
    yield from _extend(coarse, RUNG, steps, seeds[:1], CLEARLY)
    centre = min(coarse, key=lambda lr: coarse[lr])
    if not math.isfinite(coarse[centre]):
        raise ValueError(
            f"short trainings diverge at every learning rate from {min(coarse):.3g} to {max(coarse):.3g}: "
            "look at the data and the model first"
        )
    fine: dict[float, float] = {}
    for lr in (centre, centre * STEP, centre / STEP):
        fine[lr] = yield from _mean(lr, FINE * steps, seeds)
    yield from _extend(fine, STEP, FINE * steps, seeds)
    if not any(map(math.isfinite, fine.values())):
        return _decision(coarse, steps, total_steps)
    return _decision(fine, FINE * steps, total_steps)


def so_far(runs: Sequence[RunResult], total_steps: int | None = None) -> Decision | None:
    """What runs say of which more were to come: the longest of them, where these have tried three rates, else the
    shorter ones; ``None`` where nothing has held, or one rate was tried, which lies at the limit and beats nothing."""
    found: dict[int, dict[float, list[float]]] = {}
    for each in runs:
        found.setdefault(each.run.steps, {}).setdefault(each.run.lr, []).append(each.loss)
    for steps in sorted(found, reverse=True):
        losses = {lr: sum(several) / len(several) for lr, several in found[steps].items()}
        if len(losses) > (1 if steps == min(found) else 2) and any(map(math.isfinite, losses.values())):
            return _decision(losses, steps, total_steps)
    return None


def _mean(lr: float, steps: int, seeds: list[int]) -> Generator[PlannedRun, float, float]:
    losses: list[float] = []
    for seed in seeds:
        losses.append((yield PlannedRun(lr, steps, seed)))
        if not math.isfinite(losses[-1]):
            break
    return sum(losses) / len(losses)


def _extend(
    losses: dict[float, float], factor: float, steps: int, seeds: list[int], margin: float = 0.0
) -> Generator[PlannedRun, float, None]:
    """Try further rates while an end is the best, or nothing has held, or the lower end is within ``margin`` of it."""
    for _ in range(MORE):
        best, low, high = min(losses, key=lambda lr: losses[lr]), min(losses), max(losses)
        if math.isinf(losses[best]) or losses[low] <= losses[best] + margin * abs(losses[best]):
            lr = low / factor
        elif best == high:
            lr = high * factor
        else:
            return
        losses[lr] = yield from _mean(lr, steps, seeds)


def _decision(losses: dict[float, float], steps: int, total_steps: int | None) -> Decision:
    rates = sorted(losses)
    best = min(losses, key=lambda lr: losses[lr])
    near = [lr for lr in rates if losses[lr] <= losses[best] + NEAR * abs(losses[best])]
    lr = _lowest_point(losses, best)
    reason = f"of runs of {steps} updates the one at {best:.3g} ended lowest ({losses[best]:.4g})"
    if lr != best:
        reason += f", a parabola through its neighbours at {lr:.3g}"
    above = losses[rates[min(rates.index(best) + 1, len(rates) - 1)]]
    if total_steps is not None and total_steps > steps and math.isfinite(above):
        lr *= (total_steps / steps) ** HORIZON
        reason += f"; lowered to {lr:.3g} for a training of {total_steps}"
    return Decision(lr, min(near[0], lr), max(near[-1], lr), reason)


def _lowest_point(losses: dict[float, float], best: float) -> float:
    """Of the parabola through the best rate and its neighbours, at most half a step away; ``best`` at an end."""
    rates = sorted(losses)
    at = rates.index(best)
    if at in (0, len(rates) - 1):
        return best
    below, above = losses[rates[at - 1]] - losses[best], losses[rates[at + 1]] - losses[best]
    if not math.isfinite(below + above) or below + above <= 0:
        return best
    shift = 0.5 * (below - above) / (below + above)
    return float(best * (rates[at + 1] / best) ** shift)
