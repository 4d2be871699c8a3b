"""The end of a search: the two best settings and the user's own file are started again, in turns, as a user would.

On a machine that does other things too, single launches that were minutes apart say little: what is said to be faster
has been started again beside the other. Turns go on until the intervals separate, until what is left could not matter,
or until the budget is spent; a result that did not come so far is called not confirmed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ds_hf.autotune.records import Record
from ds_hf.autotune.study import LEAST_AGAIN
from ds_hf.autotune.trial import LaunchOutcome, Point
from ds_hf.measure.machine import Estimate, error_of, gain_of, pool
from ds_hf.measure.statistics import summarise

if TYPE_CHECKING:
    from ds_hf.autotune.study import Search

__all__ = ["LEAST_GAIN", "Again", "Contest", "Contestant", "affordable", "confirm"]

LEAST_GAIN = 1.01
ALIKE = 1.03  # what could be at most this much faster is not worth another turn
TURNS = 4
TRUSTED = 1.02  # a result this much slower than the user's file when started as a user would is no gain

Key = tuple[str, int, int]  # of the setting, micro-batch, accumulation


@dataclass(frozen=True)
class Contestant:
    """A measured setting and size, with all launches of it.

    Attributes:
        estimate: what is minimized (seconds of a sample, or of a step, or bytes).
        again: launches after the search.
    """

    record: Record
    point: Point
    estimate: Estimate
    again: tuple[LaunchOutcome, ...]

    @property
    def key(self) -> Key:
        return self.record.key, self.point.micro, self.point.accumulation


@dataclass(frozen=True)
class Again:
    """One launch after the search. ``started``: seconds since the epoch; ``seconds``: of the launch."""

    turn: int
    label: str
    started: float
    outcome: LaunchOutcome


class Contest:
    """What is known of the best settings, from all launches.

    Attributes:
        turns: made so far. failed: why a setting cannot win though it was fast in the engine.
        denied: why no setting can: what the engine gains does not show in the script.
        launches: all after the search, in their order. why_ended: in words.
    """

    def __init__(self, search: Search) -> None:
        self.search = search
        self.turns = 0
        self.why_ended = self.denied = ""
        self.failed: dict[Key, str] = {}
        self.launches: list[Again] = []
        self._again: dict[Key, list[LaunchOutcome]] = {}

    def ranked(self) -> list[Contestant]:
        """All that was measured and did not fail since, the best first.

        Bytes, samples and lengths have no intervals: there another setting than the user's must be better by
        ``LEAST_GAIN``, and not by the noise of what decides between equal ones.
        """
        records, own = self.search.launched(), self.search.own.key
        found = [self._contestant(record, point) for record in records for point in record.points]
        if self.search.launches.follows_no_file:
            micro = self.search.own.events["facts"]["micro"]
            found = [each for each in found if each.point.micro == micro]
        least = 1.0 if self.search.options.metric.is_timed else LEAST_GAIN

        def order(each: Contestant) -> float:
            return each.estimate.seconds * (1.0 if each.record.key == own else least)

        return sorted((c for c in found if c.key not in self.failed), key=order)

    def best(self) -> Contestant | None:
        """The fastest; where the time was over before it was started again, one that was and could be as fast."""
        ranked, own = self.ranked(), self.own()
        for each in ranked:
            is_own = own is not None and each.key == own.key
            if each.again and not is_own and self.search.options.metric.is_timed and not ranked[0].again:
                gain, low, _ = gain_of(each.estimate, ranked[0].estimate)
                return each if gain <= ALIKE and low <= 1 else ranked[0]
        return ranked[0] if ranked else None

    def own(self) -> Contestant | None:
        """The user's file; ``None`` when that could not be measured."""
        own = self.search.own
        micro = own.events["facts"]["micro"]
        point = next((point for point in own.points if point.micro == micro), None)
        return None if point is None else self._contestant(own, point)

    def _contestant(self, record: Record, point: Point) -> Contestant:
        again = tuple(self._again.get((record.key, point.micro, point.accumulation), ()))
        unit = self.search.cost(point) / point.seconds
        if not self.search.options.metric.is_timed:
            return Contestant(record, point, Estimate(self.search.cost(point), 0.0), again)
        points = [point, *(each for outcome in again for each in outcome.points)]
        found = pool([(each.seconds, each.error or error_of(each.seconds, each.low, each.high)) for each in points])
        return Contestant(record, point, Estimate(found.seconds * unit, found.error, found.launches), again)

    def rivals(self) -> list[Contestant]:
        """Who is to be started again, the best first; empty when everything is settled."""
        ranked, own = self.ranked(), self.own()
        if not ranked or self.denied:
            return []
        top, timed = ranked[0], self.search.options.metric.is_timed
        mine = own is not None and own.key == top.key
        others = [each for each in ranked[1:] if own is None or each.key != own.key][:1]
        others = [each for each in others if timed and not self._settled(top, each)]
        if own is not None and not mine and timed and not (own.again and top.again and self._settled(top, own)):
            others.append(own)
        known = top.again or (mine and not self.search.launches.seeks_length)
        return [top, *others] if others or not known else []

    def _settled(self, top: Contestant, other: Contestant) -> bool:
        """Whether more launches of both could not change anything."""
        mine = self.own()
        own = mine is not None and other.key == mine.key
        _, low, high = gain_of(other.estimate, top.estimate)
        return low > 1 or (high < LEAST_GAIN if own else low >= 1 / ALIKE)

    def turn(self, contestants: list[Contestant]) -> None:
        """Start each once, in the other order than the last time."""
        own = self.own()
        order = contestants if self.turns % 2 else contestants[::-1]
        for each in order:
            search, size = self.search, (each.point.micro, each.point.accumulation)
            mine = own is not None and each.key == own.key
            label = "your file" if mine else f"{each.record.label}, micro-batch {size[0]}"
            search.view.started(len(search.launched()), f"again, turn {self.turns + 1}: {label}", None)
            replay = "not resizable" not in search.own.events
            name = f"again-{self.turns + 1}-{each.record.number}-{size[0]}"
            started = time.time()
            length = each.point.length or None
            outcome = search.launches.natural(
                name, each.record.setting, size, each.point.data, replay=replay, length=length
            )
            self.launches.append(Again(self.turns + 1, label, started, outcome))
            worked = (outcome.kind == "ok" and not outcome.too_large) if length else outcome.points or outcome.natural
            if worked:
                self._again.setdefault(each.key, []).append(outcome)
            elif length or not (mine or self._ended_by_the_budget(outcome)):
                self.failed[each.key] = f"started as you would, it failed: {outcome.reason or outcome.kind}"
            search.view.note_load(outcome.events)
        self.turns += 1
        self._look_at_the_script()

    def _ended_by_the_budget(self, outcome: LaunchOutcome) -> bool:
        """Whether a launch had no more than what was left: nothing is known of its setting then."""
        return outcome.kind == "timeout" and self.search.launches.left <= 0

    def differ_in_size_alone(self, rivals: list[Contestant]) -> bool:
        """Whether one launch can measure the best and the user's file."""
        own = self.own()
        if own is None or len(rivals) < 2 or not self.search.in_one_launch:
            return False
        return rivals[-1].key == own.key != rivals[0].key and rivals[0].record.key == own.record.key

    def turn_together(self, rivals: list[Contestant]) -> None:
        """Measure the best and the user's file in turns in one launch, where there is time for no second one."""
        search, both = self.search, (rivals[-1], rivals[0])
        sizes = [(each.point.micro, each.point.accumulation) for each in both]
        label = f"your file and micro-batch {sizes[1][0]}"
        search.view.started(len(search.launched()), f"again, in one launch: {label}", None)
        started, setting = time.time(), rivals[0].record.setting
        name = search.launches.unused(f"again-{self.turns + 1}-{rivals[0].record.number}-both")
        outcome = search.launches.replayed(name, setting, sizes, None, search.view.event, longest=False)
        self.launches.append(Again(self.turns + 1, label, started, outcome))
        for each, size in zip(both, sizes, strict=True):
            points = [point for point in outcome.points if (point.micro, point.accumulation) == size]
            if points:
                self._again.setdefault(each.key, []).append(replace(outcome, points=points, natural=[]))
        search.view.note_load(outcome.events)
        self.turns += 1

    def _look_at_the_script(self) -> None:
        """The engine's steps may be faster, and the script's own slower: its data, or what it does besides."""
        own = self.own()
        if own is None or not self.search.options.metric.is_timed:
            return
        for top in self.ranked()[:1]:
            was, now = self.natural(own), self.natural(top)
            if top.key != own.key and was is not None and now is not None:
                ratio, low, _ = gain_of(now, was)  # times the time of the user's file
                if low > 1 and ratio > TRUSTED:
                    said = f"started as you would, the script takes {ratio:.2f} x the time of your file"
                    self.denied = f"{top.record.label} was fast in the engine, but {said}"

    def natural(self, each: Contestant) -> Estimate | None:
        """Seconds of a sample of the script's own steps; ``None`` where they were not timed."""
        numel = each.point.samples
        launches = [(list(o.natural), o.natural_error) for o in each.again if o.natural]
        own = self.own()
        if own is not None and each.key == own.key and each.record.natural:
            launches.append((list(each.record.natural), each.record.natural_error))
        found = []
        for natural, error in launches:
            summary = summarise(natural)
            found.append((summary.median / numel, error or error_of(summary.median, summary.low, summary.high)))
        return pool(found) if found else None


def affordable(rivals: list[Contestant], launches: int) -> list[Contestant]:
    """All of them, or where there is time for two the first, which is the best, and the last, which is the user's; of
    these the first alone where there is time for one, and the user's was started again already."""
    if len(rivals) <= launches:
        return rivals
    if launches == 1 and rivals[-1].again and not rivals[0].again:
        return rivals[:1]
    return [rivals[0], rivals[-1]] if launches > 1 else []


def confirm(contest: Contest) -> None:
    """Turns until all is settled, or the budget ends. Ctrl-C ends them too; what is known by then stays."""
    search = contest.search
    usual = search.typical()
    while rivals := contest.rivals():
        if contest.turns == TURNS:
            contest.why_ended = f"after {TURNS} turns their intervals still overlap"
            return
        count = max(int(search.left / search.again()), min(LEAST_AGAIN, int(search.left / usual)))
        if count <= 1 and search.left >= min(usual, search.typical_own()) and contest.differ_in_size_alone(rivals):
            contest.turn_together(rivals)
            continue
        rivals = affordable(rivals, count)
        if not rivals:
            contest.why_ended = f"the budget of {search.options.budget:g} s ended before the next turn"
            return
        search.view.expect(usual * len(rivals))
        contest.turn(rivals)
