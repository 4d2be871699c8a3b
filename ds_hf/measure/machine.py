"""How fast the machine was, and launches compared through it.

A launch's probes tell how much slower or faster than in the reference launch the same work was. Its times are divided
by that; that a probe is not the model itself, and that probes of several kinds disagree, widens the interval the more
the machine has changed. Several launches of one thing are pooled as estimates with errors of their own (random effects,
DerSimonian and Laird 1986). Errors are standard deviations of logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["NORMAL", "Estimate", "Level", "Slowdown", "compared", "error_of", "gain_of", "levels_of", "pool"]

NORMAL = 1.96  # standard deviations to either side hold 95 %
LAUNCH = 0.01  # between launches of the same thing on a machine that stays as it is: places in memory, order of starts
PROXY = 0.15  # of a change: what a probe may miss of how it acts upon the model
CLEAR = 2.6  # errors, which come from a few turns, that a change must have to be one
NOTHING = 1e-9


@dataclass(frozen=True)
class Level:
    """Seconds of a beat of one probe over a launch, and the error of that."""

    seconds: float
    error: float = 0.0


@dataclass(frozen=True)
class Slowdown:
    """Of a launch against the reference: times took ``factor`` times as long, with an error."""

    factor: float = 1.0
    error: float = LAUNCH


@dataclass(frozen=True)
class Estimate:
    """Seconds of one thing on the reference machine, with its 95 % interval, from so many launches."""

    seconds: float
    error: float
    launches: int = 1

    @property
    def low(self) -> float:
        return self.seconds * math.exp(-NORMAL * self.error)

    @property
    def high(self) -> float:
        return self.seconds * math.exp(NORMAL * self.error)


def levels_of(event: Mapping[str, object] | None) -> dict[str, Level]:
    """The levels in a "machine" event; none where there is no such event, as in journals of older searches."""
    kinds = (event or {}).get("levels")
    if not isinstance(kinds, Mapping):
        return {}
    return {str(kind): Level(float(value[0]), float(value[1])) for kind, value in kinds.items()}


def compared(here: Mapping[str, Level], reference: Mapping[str, Level], weights: Mapping[str, float]) -> Slowdown:
    """How much slower a launch's machine was than the reference.

    A difference that the probes' noise explains corrects nothing: it would only add noise.

    Args:
        weights: of the kinds; one that is absent counts as 1.
    """
    kinds = [kind for kind in here if kind in reference and weights.get(kind, 1.0) > 0]
    if not kinds:
        return Slowdown()
    total = sum(weights.get(kind, 1.0) for kind in kinds)
    share = {kind: weights.get(kind, 1.0) / total for kind in kinds}
    each = {kind: math.log(here[kind].seconds / reference[kind].seconds) for kind in kinds}
    middle = sum(share[kind] * each[kind] for kind in kinds)
    noise = math.sqrt(sum(share[k] ** 2 * (here[k].error ** 2 + reference[k].error ** 2) for k in kinds))
    if abs(middle) <= CLEAR * noise:
        return Slowdown(1.0, math.hypot(LAUNCH, max(noise, abs(middle) / NORMAL)))
    apart = sum(share[kind] * (each[kind] - middle) ** 2 for kind in kinds)
    own = sum(share[k] * (here[k].error ** 2 + reference[k].error ** 2) for k in kinds)
    missed = max(PROXY * abs(middle), math.sqrt(max(0.0, apart - own)))
    return Slowdown(math.exp(middle), math.hypot(LAUNCH, noise, missed))


def error_of(seconds: float, low: float, high: float) -> float:
    """The error that a 95 % interval stands for."""
    return math.log(max(high, NOTHING) / max(low, NOTHING)) / 2 / NORMAL if seconds > 0 else 0.0


def pool(launches: Sequence[tuple[float, float]]) -> Estimate:
    """One estimate from (seconds, error) of each launch.

    Raises:
        ValueError: there are none.
    """
    if not launches:
        raise ValueError("no launch")
    if len(launches) == 1:
        return Estimate(*launches[0])
    values = [math.log(seconds) for seconds, _ in launches]
    variances = [max(error, 1e-4) ** 2 for _, error in launches]
    weights = [1 / each for each in variances]
    middle = _weighted(values, weights)
    spread = sum(w * (v - middle) ** 2 for v, w in zip(values, weights, strict=True)) - (len(values) - 1)
    scale = sum(weights) - sum(w * w for w in weights) / sum(weights)
    between = max(0.0, spread / scale) if scale > 0 else 0.0
    weights = [1 / (each + between) for each in variances]
    return Estimate(math.exp(_weighted(values, weights)), 1 / math.sqrt(sum(weights)), len(values))


def _weighted(values: Sequence[float], weights: Sequence[float]) -> float:
    return sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)


def gain_of(before: Estimate, after: Estimate) -> tuple[float, float, float]:
    """How many times as fast ``after`` is, and the 95 % interval of that."""
    middle = math.log(before.seconds / after.seconds)
    reach = NORMAL * math.hypot(before.error, after.error)
    return math.exp(middle), math.exp(middle - reach), math.exp(middle + reach)
