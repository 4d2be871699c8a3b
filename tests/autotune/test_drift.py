"""Whole searches on a machine whose speed halves midway: the right setting wins, and the intervals hold the truth."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
from rich.console import Console

from ds_hf.autotune.confirm import affordable
from ds_hf.autotune.load import LoadMeter, gpu_share, warning_of
from ds_hf.autotune.options import Metric, Options
from ds_hf.autotune.records import Record, record_of
from ds_hf.autotune.result import Result
from ds_hf.autotune.trial import Point
from ds_hf.autotune.view import View
from ds_hf.measure.machine import compared, levels_of
from ds_hf.measure.statistics import summarise
from ds_hf.measure.turns import StopRules, settle, take_turns
from tests.autotune.world import World

PROBES = {"compute": 0.004, "copy": 0.002, "communication": 0.003}


class Drifting(World):
    """Its machine takes twice as long from the clock's ``changes`` on; times have noise, and are measured as an engine
    measures them; with ``old`` as one did before: sizes one after the other, and no probes.
    """

    now, changes, old, factor = 0.0, math.inf, False, 2.0

    def begin(self, seed: int, changes: float, *, old: bool = False) -> Drifting:
        self.random, self.changes, self.old = random.Random(seed), changes, old
        return self

    def work(self, seconds: float, noise: float = 0.02) -> float:
        taken = seconds * (self.factor if self.now >= self.changes else 1) * math.exp(self.random.gauss(0, noise))
        self.now += taken
        return taken

    def read(self, measured: float = 0.0) -> dict[str, float]:
        return {kind: self.work(seconds, 0.05) for kind, seconds in PROBES.items()}

    def run(self, launch: Any, watch: Any) -> Any:
        outcome = super().run(launch, None)
        self.work(8.0)
        truth = {(p.micro, p.accumulation): p.seconds for p in outcome.points}
        if truth:
            self.replay(outcome, truth)
        if outcome.natural:
            before = self.read()
            outcome.natural = [self.work(seconds) for seconds in outcome.natural]
            after = self.read()
            levels = {kind: [math.sqrt(before[kind] * after[kind]), 0.04] for kind in PROBES}
            if not self.old:
                outcome.take({"event": "machine", "phase": "natural", "levels": levels, "drift": 1.0})
        return outcome

    def replay(self, outcome: Any, truth: dict[tuple[int, int], float]) -> None:
        kept = {(p.micro, p.accumulation): p for p in outcome.points}
        if self.old:
            found = {size: summarise([self.work(truth[size]) for _ in range(12)]) for size in truth}
        else:
            timing = settle(
                take_turns(list(truth), lambda _: True, lambda size: [self.work(truth[size]) for _ in range(4)],
                           self.read, StopRules())
            )  # fmt: skip
            found = timing.points
            levels = {kind: [level.seconds, level.error] for kind, level in timing.machine.items()}
            outcome.take({"event": "machine", "levels": levels, "drift": timing.drift})
        for size, summary in found.items():
            outcome.take(
                {"event": "point", "outcome": "ok", "micro": size[0], "accumulation": size[1],
                 "seconds": summary.median, "low": summary.low, "high": summary.high, "peak": kept[size].peak,
                 "optimizer_seconds": 0.01, "steps": summary.steps}
            )  # fmt: skip


def truth_of(world: World, result: Result) -> tuple[float, float]:
    """True gain of the result over the user's file, and its shortfall from the best of all."""
    setting, point = result.best[0].setting, result.best[1]
    key = (setting["zero_optimization.stage"], setting["gradient_checkpointing"], bool(setting["ds_hf.compile"]))
    grid = world.grid()
    value = grid[(*key, point.micro)]
    return value / grid[3, False, False, world.micro], 1 - value / max(grid.values())


@pytest.mark.parametrize("seeds", [2, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_the_right_setting_wins_though_the_speed_halves(
    search: Callable[..., Result], tmp_path: Path, seeds: int
) -> None:
    """The old way, from the same seeds, keeps the user's file or tells of a gain that is not there."""
    held = near = old_good = 0
    for seed in range(seeds):
        changes = random.Random(seed).uniform(30, 90)
        world = Drifting().begin(seed, changes)
        result = search(world, results_dir=tmp_path / f"new-{seed}", forget=True)
        gain, missed = truth_of(world, result)
        low, high = result.interval
        held += result.trusted and low <= gain <= high
        near += missed < 0.05
        world = Drifting().begin(seed, changes, old=True)
        result = search(world, results_dir=tmp_path / f"old-{seed}", confirm=False, forget=True)
        gain, missed = truth_of(world, result)
        low, high = result.interval
        old_good += low <= gain <= high and missed < 0.05
    assert held >= 0.9 * seeds
    assert near >= 0.9 * seeds
    assert old_good < 0.5 * seeds


def test_a_result_that_was_not_confirmed_says_so(search: Callable[..., Result], tmp_path: Path) -> None:
    result = search(World(), confirm=False)
    assert not result.kept
    assert not result.trusted
    report = (tmp_path / "results" / "report.html").read_text()
    top = report[report.index('class="headline') : report.index("<h2>")]
    assert "Not confirmed" in top
    assert f"{result.gain:.2f}" not in top
    assert "not confirmed" in (tmp_path / "results" / "summary.txt").read_text()


@pytest.mark.parametrize(
    ("launches", "again", "left"),
    [(0, "u", ""), (1, "", ""), (1, "u", "b"), (1, "bu", ""), (1, "su", "b"), (2, "u", "bu"), (9, "", "bsu")],
)
def test_a_short_budget_confirms_the_best_beside_the_users_file(launches: int, again: str, left: str) -> None:
    """b: the best, s: the second, u: the user's; ``again``: who was started again already."""
    contestants: Any = [SimpleNamespace(name=name, again=(name,) if name in again else ()) for name in "bsu"]
    chosen: Any = affordable(contestants, launches)
    assert "".join(each.name for each in chosen) == left


def test_where_there_is_time_for_one_launch_it_has_both(search: Callable[..., Result]) -> None:
    """A file that divides its batch too finely, and a machine so busy that one start is all that is left."""

    class Slow(World):
        def launch_seconds(self, compiled: bool, points: int) -> float:
            return 1000.0

    world = Slow()
    result = search(world, budget=1100.0)  # a launch is expected to take 600 s
    assert len(world.launched) == len(world.again) == 1
    assert result.trusted
    assert result.launches == (2, 2)
    assert result.best[1].micro > world.micro
    assert not result.kept
    (again,) = result.again
    assert {point.micro for point in again.outcome.points} == {world.micro, result.best[1].micro}


def test_load_is_warned_of_once(capsys: pytest.CaptureFixture[str]) -> None:
    view = View(Console(), Options())
    for _ in range(3):
        view.note_load({"load": {"cpu": 3.0, "cores": 4.0}})
    assert capsys.readouterr().out.count("warning: other processes used 3.0 of 4 cores") == 1


@pytest.mark.parametrize(
    ("metric", "shown"), [(Metric.MEMORY, "64.0 MiB"), (Metric.LATENCY, "100.0 ms/step (-10% +10%)")]
)
def test_the_interval_of_a_time_stands_beside_a_time(
    metric: Metric, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """ "1.8 MiB (-37% +59%)" was told of bytes, which are counted."""
    point = Point(2, 1, 0.1, 0.09, 0.11, 64 << 20)
    View(Console(width=200), Options(metric=metric)).ended(Record(0, {}, "ok", own=True, points=(point,)))
    assert f"2 x 1  {shown}  64.0 MiB  ok" in capsys.readouterr().out


def test_load_is_measured_and_warned_of() -> None:
    meter = LoadMeter(1)
    meter.cores = [0, 1]
    meter._busy_before = meter._busy() - 30.0
    meter._start, meter._at = meter._start - 20, meter._start
    found = meter.result()
    assert found["cpu"] == pytest.approx(1.5, rel=0.2)
    assert found["cores"] == 2
    assert warning_of({"cpu": 1.5, "cores": 2.0}) == "other processes used 1.5 of 2 cores"
    assert warning_of({"cpu": 0.1, "cores": 2.0, "gpu": 0.6}) == "other processes used 60% of a GPU"
    assert warning_of({"cpu": 0.1, "cores": 2.0, "gpu": None}) == warning_of({}) == ""


@pytest.mark.parametrize(("visible", "busiest"), [(None, 0.07), ("0", 0.03), ("GPU-b", 0.07)])
def test_gpus_of_others_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, busiest: float
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        '#!/bin/sh\ncase "$*" in *--id=0) echo 3;; *--id=GPU-b) echo 7;; *--id*) exit 6;; *) echo 3; echo 7;; esac\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_share() == busiest


def test_journals_of_older_searches_are_read() -> None:
    """Their points know of no machine, their launches of no probe: nothing is corrected."""
    point = {"micro": 2, "accumulation": 4, "seconds": 1.0, "low": 0.9, "high": 1.1, "peak": 5}
    kept = {"setting": {}, "kind": "pruned", "points": [point], "events": {"facts": {}}}
    trial = optuna.create_trial(value=1.0, user_attrs=kept)
    record = record_of(trial)
    assert record is not None
    assert record.points[0].slowdown == 1
    assert compared(levels_of(record.events.get("machine")), {}, {}).factor == 1
