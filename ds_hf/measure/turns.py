"""Timing several things on a machine that changes meanwhile: in turns, with a fixed probe beside every one.

``take_turns`` says what is timed next: every point once, again and again until all are known well enough, and the first
once more at the end. Between two visits a *reading* is taken of probes, pieces of work that are always the same.
``settle`` takes out what all had in common in a turn: log(seconds) = point + turn + rest, fitted by least squares over
points and probes together. What no turn explains stays, and widens the intervals. Times are seconds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ds_hf.measure.machine import Level
from ds_hf.measure.statistics import Summary, summarise

__all__ = ["StopRules", "Timing", "Visit", "settle", "take_turns"]

K = TypeVar("K", bound=Hashable)
Reading = Mapping[str, float]  # kind of probe -> seconds of a beat

SWEEPS = 12  # of the alternating fit; it converges in a few
ONE_READING = 0.05  # standard error of the logarithm of a single reading


@dataclass(frozen=True)
class Visit(Generic[K]):
    """Consecutive steps of one point in one turn, and the probes' beats beside them."""

    point: K
    turn: int
    steps: tuple[float, ...]
    machine: Reading = field(default_factory=dict)


@dataclass(frozen=True)
class StopRules:
    """When a point is known well enough.

    Attributes:
        steps, seconds: at most, for each point. precision: of its interval, after two visits at least.
        alone: finish a point before the next begins: going back to it costs too much (it is compiled anew).
    """

    steps: int = 20
    seconds: float = 20.0
    precision: float = 0.02
    alone: bool = False


@dataclass(frozen=True)
class Timing(Generic[K]):
    """What came out.

    Attributes:
        points: each with the machine's changes within this launch taken out.
        machine: level of each probe over the launch, at which the points are given.
        drift: the machine's slowest turn over its fastest.
    """

    points: dict[K, Summary]
    machine: dict[str, Level]
    drift: float


def take_turns(
    points: Sequence[K],
    prepare: Callable[[K], bool],
    visit: Callable[[K], Sequence[float]],
    read: Callable[[float], Reading],
    rules: StopRules,
    *,
    agree: Callable[[bool], bool] = bool,
    lost: Callable[[Summary, K], bool] = lambda found, point: False,
) -> list[Visit[K]]:
    """Visit the points in turns. Where several processes take part, they differ in times only: ``agree`` decides.

    Args:
        prepare: makes ready for a point, before its first visit; False leaves it out.
        visit: seconds of a few steps of a point.
        read: the probes; it is told how long the last visit took, of which it may take a small share.
        agree: the first process's answer, on all.
        lost: whether a point is so bad that one visit is enough.
    """
    visits: list[Visit[K]] = []
    before: Reading = {}

    def once(point: K, turn: int) -> None:
        nonlocal before
        steps = tuple(visit(point))
        after = read(sum(steps))
        visits.append(Visit(point, turn, steps, _between(before, after)))
        before = after

    def enough(chosen: Sequence[K]) -> bool:
        found = settle(visits).points
        return agree(all(_known(visits, point, found[point], rules) for point in chosen))

    turn, left = 0, []
    for point in points:
        if not prepare(point):
            continue
        before = read(0.0)
        once(point, turn)
        if agree(lost(settle(visits).points[point], point)):
            continue
        left.append(point)
        while rules.alone and not enough([point]):
            turn += 1
            once(point, turn)
        turn += rules.alone
    while left and not rules.alone and not enough(left):
        turn += 1
        for point in left:
            once(point, turn)
    if len(left) > 1 and not rules.alone:
        once(left[0], turn + 1)  # nothing was timed after the others in their last turn
    return visits


def _known(visits: Sequence[Visit[K]], point: K, found: Summary, rules: StopRules) -> bool:
    own = [each.steps for each in visits if each.point == point]
    count, seconds = sum(map(len, own)), sum(map(sum, own))
    return count >= rules.steps or seconds > rules.seconds or (len(own) > 1 and found.precision <= rules.precision)


def _between(before: Reading, after: Reading) -> Reading:
    return {kind: (before[kind] + after[kind]) / 2 for kind in before.keys() & after.keys()}


def settle(visits: Sequence[Visit[K]]) -> Timing[K]:
    """Points, level of the machine and its drift from all visits.

    Raises:
        ValueError: there are none.
    """
    if not visits:
        raise ValueError("no step was measured")
    points = list(dict.fromkeys(each.point for each in visits))
    kinds = sorted(set.intersection(*(set(each.machine) for each in visits)))
    turns = sorted({each.turn for each in visits})
    rows = [_row([each for each in visits if each.point == point], _typical) for point in points]
    probes = {kind: _row(visits, lambda each, kind=kind: math.log(each.machine[kind])) for kind in kinds}  # type: ignore[misc]
    if kinds:
        rows.append({turn: statistics.fmean(probes[kind][turn] for kind in kinds) for turn in turns})
    effects = _turn_effects(rows, turns)
    unsure = _unsure(rows, effects)
    found = {point: _point([v for v in visits if v.point == point], effects, unsure) for point in points}
    levels = {kind: _level(row, effects) for kind, row in probes.items()}
    return Timing(found, levels, math.exp(max(effects.values()) - min(effects.values())))


def _typical(visit: Visit[K]) -> float:
    return math.log(statistics.median(visit.steps))


def _row(visits: Sequence[Visit[K]], value: Callable[[Visit[K]], float]) -> dict[int, float]:
    """Mean of ``value`` by turn."""
    turns = sorted({each.turn for each in visits})
    return {turn: statistics.fmean(value(each) for each in visits if each.turn == turn) for turn in turns}


def _turn_effects(rows: Sequence[Mapping[int, float]], turns: Sequence[int]) -> dict[int, float]:
    """Of the additive table; their mean is 0. A row with a single turn says nothing of turns."""
    effects = dict.fromkeys(turns, 0.0)
    told = [row for row in rows if len(row) > 1]
    for _ in range(SWEEPS if told else 0):
        levels = [statistics.fmean(value - effects[turn] for turn, value in row.items()) for row in told]
        for turn in turns:
            rest = [row[turn] - level for row, level in zip(told, levels, strict=True) if turn in row]
            effects[turn] = statistics.fmean(rest) if rest else 0.0
        middle = statistics.fmean(effects.values())
        effects = {turn: value - middle for turn, value in effects.items()}
    return effects


def _residuals(row: Mapping[int, float], effects: Mapping[int, float]) -> list[float]:
    rest = [value - effects[turn] for turn, value in row.items()]
    middle = statistics.fmean(rest)
    return [value - middle for value in rest]


def _unsure(rows: Sequence[Mapping[int, float]], effects: Mapping[int, float]) -> float:
    """Standard error of a turn's effect."""
    told = [row for row in rows if len(row) > 1]
    values = [value for row in told for value in _residuals(row, effects)]
    free = len(values) - len(told) - len(effects) + 1
    if free <= 0:
        return 0.0 if len(effects) == 1 else ONE_READING
    return math.sqrt(sum(value**2 for value in values) / free / max(1.0, len(values) / len(effects)))


def _point(visits: Sequence[Visit[K]], effects: Mapping[int, float], unsure: float) -> Summary:
    """Interval of the steps without the turns' effects; wider where visits differ by more than their steps."""
    found = summarise([step * math.exp(-effects[each.turn]) for each in visits for step in each.steps])
    own = _row(visits, _typical)
    rest = _residuals(own, effects)
    scatter = 2 * statistics.stdev(rest) / math.sqrt(len(rest)) if len(rest) > 1 else 0.0
    missing = 2 * unsure * math.sqrt(max(0.0, 1 / len(own) - 1 / len(effects)))
    down, up = (max(abs(math.log(end / found.median)), scatter) for end in (found.low, found.high))
    low, high = (found.median * math.exp(sign * math.hypot(side, missing)) for sign, side in ((-1, down), (1, up)))
    return Summary(found.median, low, high, found.steps, found.warm_up)


def _level(row: Mapping[int, float], effects: Mapping[int, float]) -> Level:
    rest = _residuals(row, effects)
    error = statistics.stdev(rest) / math.sqrt(len(rest)) if len(rest) > 1 else ONE_READING
    return Level(math.exp(statistics.fmean(row.values())), error)
