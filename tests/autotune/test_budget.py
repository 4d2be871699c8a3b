"""What a search does with a budget that is enough for a few launches, in worlds whose launches take their time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from ds_hf.autotune.division import EXPERTS
from ds_hf.autotune.launches import Launches
from ds_hf.autotune.result import Result
from ds_hf.autotune.space import COMPILE
from ds_hf.autotune.study import Search as Study
from ds_hf.autotune.trial import Launch, LaunchOutcome
from tests.autotune.conftest import KEPT
from tests.autotune.world import World

Search = Callable[..., Result]


@dataclass
class Timed(World):
    """The first launch takes 49 s, others 30 s, without their starts 6 s. ``gain``: of other settings than the user's
    stage 3, not compiled."""

    steps: int = 1
    start_seconds: float = 24.0
    gain: float = 1.3

    def launch_seconds(self, compiled: bool, points: int) -> float:
        return 30.0 if len(self.launched) > 1 else 49.0

    def seconds(self, stage: int, checkpointing: bool, compiled: bool, micro: int, steps: int) -> float:
        return (0.1 if stage == 3 and not compiled else 0.1 / self.gain) * micro**0.5 * steps


@pytest.fixture
def timed(search: Search, monkeypatch: pytest.MonkeyPatch) -> Search:
    """A search whose budget is what its launches take."""

    def run(world: World, **changes: Any) -> Result:
        monkeypatch.setattr(Launches, "left", property(lambda self: self.options.budget - world.spent))
        free = changes.pop("tune", "zero_optimization.stage")
        fix = (*KEPT, *({"zero_optimization.stage", "ds_hf.compile", "gradient_checkpointing"} - {free}))
        return search(world, tune=(free, *changes.pop("more", ())), fix=fix, **changes)

    return run


def test_what_is_left_is_used_where_there_is_nothing_to_confirm(timed: Search) -> None:
    """The user's file is the best so far, and what is left would be enough for two launches: they are no use yet."""
    world = Timed()
    result = timed(world, budget=110.0)
    assert [launch["stage"] for launch in world.launched][:1] == [3]
    assert len(world.launched) == 2
    assert not result.kept
    assert not result.trusted
    assert "before the next turn" in result.why_not


def test_a_setting_beside_the_users_file_needs_no_start(timed: Search) -> None:
    """So the same budget is enough for it, and to confirm it."""
    world = Timed()
    result = timed(world, budget=120.0, tune="ds_hf.compile")
    assert [launch["compiled"] for launch in world.launched] == [False, True]
    assert world.starts == 1 + len(world.again) == 3
    assert world.spent == 49 + 6 + 2 * 30
    assert result.trusted
    assert result.gain == pytest.approx(1.3)


def test_blocks_that_were_compiled_before_need_less() -> None:
    """What processes that are there are expected to take: the first that compiles says nothing of the others."""

    def record(seconds: float, goes_on: bool = True, **setting: Any) -> Any:
        return SimpleNamespace(key=str(setting), setting=setting, points=[1], goes_on=goes_on, seconds=seconds)

    launched = [record(49.0, goes_on=False, stage=2)]
    there: Any = SimpleNamespace(goes_on=lambda _: True)
    search: Any = SimpleNamespace(launches=there, typical=lambda: 40.0, launched=lambda: launched)
    compiled = {COMPILE: "blocks"}
    assert Study._takes(search, {"stage": 1}) == 10.0
    assert Study._takes(search, {"stage": 1, **compiled}) == 20.0
    launched.append(record(28.0, stage=2, **compiled))
    assert Study._takes(search, {"stage": 1, **compiled}) == 10.0
    launched += [record(6.0, stage=1), record(8.0, stage=1, **compiled), record(7.0, stage=0)]
    assert Study._takes(search, {"stage": 0, **compiled}) == 7.0
    assert Study._takes(search, {"stage": 0, COMPILE: "model"}) == 28.0


def test_what_is_divided_stays_so_and_that_costs_others_a_start() -> None:
    """Experts that are divided cannot be put together again: what processes that are there could still measure with
    whole ones would need a start of its own."""
    there: Any = SimpleNamespace(goes_on=lambda setting: setting.get(EXPERTS, 0) < 8)
    search: Any = SimpleNamespace(launches=there, typical=lambda: 40.0, _takes=lambda setting: 10.0)
    whole, together, divided, further = ({EXPERTS: size, "stage": 1} for size in (0, 1, 2, 8))
    assert Study._costs_others(search, divided, [divided, whole]) == 30.0
    assert Study._costs_others(search, divided, [divided, {**divided, "stage": 2}]) == 30.0  # another key
    assert Study._costs_others(search, divided, [divided, {**divided, COMPILE: "blocks"}]) == 0.0
    assert Study._costs_others(search, together, [whole, together, divided]) == 0.0
    assert Study._costs_others(search, divided, [divided, further]) == 0.0  # needs one anyway
    assert Study._costs_others(search, further, [whole]) == 0.0  # does so itself


@dataclass
class Alike(Timed):
    """Stage 0 is a little faster than stage 1, and a little slower when it is started again, which takes long."""

    again_seconds: float = 45.0

    def launch_seconds(self, compiled: bool, points: int) -> float:
        return self.again_seconds if self.again else super().launch_seconds(compiled, points)

    def seconds(self, stage: int, checkpointing: bool, compiled: bool, micro: int, steps: int) -> float:
        gain = {0: 1.3, 1: 1.295}.get(stage, 1.0) * (1 / 1.02 if self.again and stage == 0 else 1)
        return 0.1 / gain * micro**0.5 * steps


@pytest.mark.parametrize(("again_seconds", "stages"), [(45.0, [3, 0]), (25.0, [3, 0, 1])])
def test_of_two_alike_the_one_that_was_started_again(timed: Search, again_seconds: float, stages: list[int]) -> None:
    """Where there is time for a launch more it is that of the other, which seems faster by then."""
    world = Alike(stays=False, again_seconds=again_seconds)
    result = timed(world, budget=230.0, sampler="exhaustive")
    assert [launch["stage"] for launch in world.again] == stages
    assert result.config["zero_optimization"]["stage"] == stages[-1]
    assert result.trusted


@pytest.mark.parametrize("left", [0.0, 50.0])
def test_a_setting_that_the_budget_ended_has_not_failed(timed: Search, left: float) -> None:
    """It was fast in the engine, and its last launch got what was left: that was told as a failure of the setting, and
    the file was dropped. With time left it is one."""
    world = Timed()
    run = world.run

    def ends(launch: Launch, watch: Any) -> LaunchOutcome:
        outcome = run(launch, watch)
        if len(world.again) < 2:
            return outcome
        world.spent = 230.0 - left
        return LaunchOutcome("timeout", "took longer than 30 s", seconds=30.0, events=outcome.events)

    world.run = ends  # type: ignore[method-assign]
    result = timed(world, budget=230.0)
    assert [launch["stage"] for launch in world.again][:1] == [3]
    assert result.trusted == result.kept == bool(left)
    assert ("ended before the next turn" in result.why_not) == (not left)


def test_time_for_one_launch_confirms_another_division(timed: Search) -> None:
    """Nothing new is begun that would leave too little for it."""
    world = Timed(steps=4, gain=1.0)
    result = timed(world, budget=80.0)
    assert len(world.launched) == len(world.again) == 1
    assert result.trusted
    assert not result.kept
    assert "beside the launches that confirm" in result.why_stopped


def test_sizes_that_are_launches_of_their_own_are_counted(timed: Search) -> None:
    """As of a loss that the script computes: three sizes take three starts, and the two that confirm one each."""
    world = Timed(steps=4, resizable=False)
    named = ("train_micro_batch_size_per_gpu",)
    result = timed(world, budget=270.0, sampler="exhaustive", micros=3, more=named)
    tried = len(world.launched) - 1
    assert tried in (4, 8)  # whole settings of the sizes 1, 2, 4 and 8
    assert world.spent <= 270.0
    assert result.trusted


@pytest.mark.parametrize("budget", [40.0, 60.0, 75.0, 90.0, 110.0, 130.0, 160.0, 200.0, 400.0])
@pytest.mark.parametrize("gain", [0.8, 1.0, 1.3])
@pytest.mark.parametrize("stays", [True, False])
def test_why_it_stopped_is_true(timed: Search, budget: float, gain: float, stays: bool) -> None:
    world = Timed(gain=gain, stays=stays)
    spent: list[float] = []
    run = world.run

    def watched(launch: Launch, watch: Any) -> LaunchOutcome:
        if not launch.request.events.rsplit("/", 2)[-2].startswith("again"):
            outcome = run(launch, watch)
            spent.append(world.spent)
            return outcome
        return run(launch, watch)

    world.run = watched  # type: ignore[method-assign]
    result = timed(world, budget=budget)
    left = budget - spent[-1]
    assert ("is spent" in result.why_stopped) == (left <= 0)
    if len(world.launched) == 1 and result.kept:
        assert left < 30  # which no launch could take
    if not result.kept and not result.trusted:
        assert budget - world.spent < 2 * 30  # which no turn could take
