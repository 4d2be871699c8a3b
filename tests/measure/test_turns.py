"""Timing in turns on machines that are made up: one that slows down, one that is steady, probes that are noisy."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from ds_hf.measure.machine import LAUNCH, Estimate, compared, error_of, gain_of
from ds_hf.measure.statistics import Summary, summarise
from ds_hf.measure.turns import StopRules, Timing, Visit, settle, take_turns

TRUTH = {"small": 0.20, "middle": 0.15, "large": 0.16}
PROBES = {"compute": 0.004, "copy": 0.002}


class Machine:
    """Work takes longer by ``factor`` from ``changes`` on (seconds of its own clock). Steps and probes have noise."""

    def __init__(self, seed: int, changes: float = math.inf, factor: float = 2.0) -> None:
        self.random = random.Random(seed)
        self.now, self.changes, self.factor = 0.0, changes, factor
        self.bias = {kind: self.random.gauss(1, 0.08) for kind in PROBES}  # a probe is slowed in its own way

    def work(self, seconds: float, noise: float = 0.02, power: float = 1.0) -> float:
        slow = self.factor**power if self.now >= self.changes else 1.0
        taken = seconds * slow * math.exp(self.random.gauss(0, noise))
        self.now += taken
        return taken

    def launch(self, truth: dict[str, float]) -> Timing[str]:
        """Start (8 s), then every point in turns."""
        self.work(8.0)
        place = math.exp(self.random.gauss(0, 0.005))

        def read(measured: float) -> dict[str, float]:
            return {kind: self.work(seconds, 0.05, self.bias[kind]) for kind, seconds in PROBES.items()}

        def visit(point: str) -> list[float]:
            return [self.work(truth[point] * place) for _ in range(4)]

        return settle(take_turns(list(truth), lambda point: self.work(truth[point]) > 0, visit, read, StopRules()))

    def one_after_the_other(self, truth: dict[str, float]) -> dict[str, Summary]:
        """What was done before: every point by itself, without probes."""
        self.work(8.0)
        return {point: summarise([self.work(seconds) for _ in range(12)]) for point, seconds in truth.items()}


def gain(before: Summary, after: Summary, slowdown: float = 1.0, error: float = LAUNCH) -> tuple[float, float, float]:
    each = [Estimate(s.median, math.hypot(LAUNCH, error_of(s.median, s.low, s.high))) for s in (before, after)]
    return gain_of(each[0], Estimate(each[1].seconds / slowdown, math.hypot(each[1].error, error)))


def half_way(seed: int) -> float:
    """Somewhere in the first or the second of two launches."""
    return random.Random(1000 + seed).uniform(9, 27)


def test_the_right_size_wins_though_the_speed_halves_midway() -> None:
    """In 100 seeds: sizes of one launch, with the truth inside the interval of their ratio in nine of ten."""
    held = right = old_held = old_right = 0
    for seed in range(100):
        found = Machine(seed, changes=random.Random(seed).uniform(9, 14)).launch(TRUTH).points
        right += min(found, key=lambda point: found[point].median) != "small"
        _, low, high = gain(found["small"], found["middle"], error=0)
        held += low <= 0.20 / 0.15 <= high
        old = Machine(seed, changes=random.Random(seed).uniform(9, 14)).one_after_the_other(TRUTH)
        _, low, high = gain(old["small"], old["middle"], error=0)
        old_held += low <= 0.20 / 0.15 <= high
        old_right += min(old, key=lambda point: old[point].median) != "small"
    assert held >= 90
    assert right == 100
    assert old_held < 70
    assert old_right < 90


def test_launches_are_compared_through_the_probes() -> None:
    """The second launch is 1.25 x as fast. Between them, or within, the machine's speed halves."""
    other = {point: seconds / 1.25 for point, seconds in TRUTH.items()}
    held = faster = old_held = old_faster = count = 0
    for seed in range(100):
        machine = Machine(seed, half_way(seed))
        first, second = machine.launch(TRUTH), machine.launch(other)
        change = compared(second.machine, first.machine, {})
        old = Machine(seed, half_way(seed))
        before, after = old.one_after_the_other(TRUTH), old.one_after_the_other(other)
        for point in TRUTH:
            count += 1
            middle, low, high = gain(first.points[point], second.points[point], change.factor, change.error)
            held += low <= 1.25 <= high
            faster += middle > 1
            middle, low, high = gain(before[point], after[point])
            old_held += low <= 1.25 <= high
            old_faster += middle > 1
    assert held >= 0.9 * count
    assert faster >= 0.97 * count
    assert old_held < 0.5 * count
    assert old_faster < 0.5 * count


def test_a_steady_machine_is_not_corrected_and_intervals_stay_narrow() -> None:
    widths, changed = [], 0
    for seed in range(50):
        machine = Machine(seed)
        first, second = machine.launch(TRUTH), machine.launch(TRUTH)
        change = compared(second.machine, first.machine, {})
        changed += change.factor != 1
        _, low, high = gain(first.points["small"], second.points["small"], change.factor, change.error)
        widths.append(math.log(high / low) / 2)
    assert changed <= 5
    assert sum(widths) / 50 < 0.06


def test_turns_and_the_first_again_at_the_end() -> None:
    order: list[str] = []

    def visit(point: str) -> Sequence[float]:
        order.append(point)
        return [0.1, 0.11, 0.09, 0.1]

    take_turns(list("abc"), lambda point: point != "b", visit, lambda measured: {}, StopRules(steps=8))
    assert "".join(order) == "acaca"
    order.clear()
    take_turns(list("abc"), lambda _: True, visit, lambda measured: {}, StopRules(steps=8, alone=True))
    assert "".join(order) == "aabbcc"
    order.clear()
    take_turns(list("abc"), lambda _: True, visit, lambda _: {}, StopRules(steps=8), lost=lambda _, point: point == "b")
    assert "".join(order) == "abcaca"


def test_readings_are_taken_around_every_visit_and_told_how_long_it_was() -> None:
    told: list[float] = []

    def read(measured: float) -> dict[str, float]:
        told.append(measured)
        return {"compute": float(len(told))}

    visits = take_turns(["a"], lambda _: True, lambda _: [0.5, 0.5], read, StopRules(steps=4, precision=0))
    assert told == [0.0, 1.0, 1.0]
    assert [each.machine for each in visits] == [{"compute": 1.5}, {"compute": 2.5}]


def test_drift_is_what_all_have_in_common() -> None:
    visits = [
        Visit(point, turn, (seconds * slow,) * 4, {"compute": 0.01 * slow})
        for turn, slow in enumerate((1.0, 1.0, 2.0, 2.0))
        for point, seconds in (("a", 0.1), ("b", 0.3))
    ]
    found = settle(visits)
    assert found.drift == pytest.approx(2)
    assert found.points["b"].median / found.points["a"].median == pytest.approx(3)
    assert found.points["a"].median == pytest.approx(0.1 * math.sqrt(2))  # at the launch's mean speed, as its probes
    assert found.machine["compute"].seconds == pytest.approx(0.01 * math.sqrt(2))


def test_what_no_turn_explains_widens_the_interval() -> None:
    jumps = [Visit("a", turn, (0.1 if turn % 2 else 0.13,) * 4, {"compute": 0.01}) for turn in range(4)]
    steady = [Visit("a", turn, (0.1,) * 4, {"compute": 0.01}) for turn in range(4)]
    assert settle(jumps).points["a"].precision > 0.05
    assert settle(steady).points["a"].precision < 1e-6


def test_a_single_visit_and_none() -> None:
    found = settle([Visit("a", 0, (0.1, 0.1, 0.1))])
    assert found.points["a"].median == pytest.approx(0.1)
    assert found.machine == {}
    with pytest.raises(ValueError, match="no step"):
        settle([])
