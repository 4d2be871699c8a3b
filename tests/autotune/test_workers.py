"""Workers of the DataLoader: tried where the script waits for data, kept where they help."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_hf.autotune.reasons import Change
from ds_hf.autotune.result import Result
from tests.autotune.world import World

Search = Callable[..., Result]
KEY, OPTION = "dataloader_num_workers", "--dataloader_num_workers"


class Waiting(World):
    """A world whose script loads for ``load`` seconds a step, before its step or, with workers, beside it."""

    load, counts = 0.3, ()

    def run(self, launch: Any, watch: Any) -> Any:
        outcome = super().run(launch, watch)
        words = list(launch.words)
        workers = int(words[words.index(OPTION) + 1]) if OPTION in words else 0
        if workers:
            self.counts = (*self.counts, workers)
        wait = [self.load if not workers else max(0.0, self.load / workers - step) for step in outcome.natural]
        outcome.waits = wait
        outcome.natural = [step + more for step, more in zip(outcome.natural, wait, strict=True)]
        return outcome

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "cores": 8}


def change(result: Result) -> Change | None:
    return next((change for change in result.changes if change.key == KEY), None)


def test_a_script_that_waits_gets_workers(search: Search, tmp_path: Path) -> None:
    world = Waiting()
    result = search(world)
    found = change(result)
    assert found is not None
    assert (found.before, found.after) == (0, result.workers)
    assert world.counts == (found.after,)  # one launch
    assert result.words[result.words.index(OPTION) + 1] == str(found.after)
    assert OPTION in (tmp_path / "results" / "command.txt").read_text()
    step = sorted(result.confirmed.natural)[3]  # type: ignore[union-attr]
    assert f"it takes {step * 1e3:,.0f} ms instead of {(step + 0.3) * 1e3:,.0f}, measured" in found.reason
    assert "ms a step" in found.reason
    sidecar = json.loads((tmp_path / "results" / "ds_config.tuned.reasons.json").read_text())
    assert found.reason in {each["reason"] for each in sidecar["changes"]}


def test_as_many_as_load_in_the_time_of_a_step(search: Search) -> None:
    world = Waiting()
    world.seconds = lambda *_: 0.1  # type: ignore[method-assign]
    result = search(world)  # 0.3 s of loading behind 0.11 s of the script: 3 workers, and all settings alike
    assert world.counts == (3,)
    assert not result.kept
    assert result.gain == 1.0  # in the engine
    assert result.confirmed is not None
    assert result.confirmed.natural[0] == pytest.approx(0.11)
    assert [each.key for each in result.changes] == [KEY]


def test_a_script_that_does_not_wait_gets_none(search: Search, tmp_path: Path) -> None:
    world = Waiting()
    world.load = 0.002
    assert change(search(world)) is None
    assert world.counts == ()
    kept = json.loads((tmp_path / "results" / "ds_config.tuned.reasons.json").read_text())["kept"]
    assert "of its time for data" in kept[KEY]


def test_workers_that_do_not_help_are_dropped(search: Search, tmp_path: Path) -> None:
    world = Waiting()
    world.facts = lambda: {**World.facts(world), "cores": 1}  # type: ignore[method-assign]
    world.load = 5.0  # one worker loads no faster than the process itself, and the step is nothing beside it
    world.seconds = lambda *_: 0.01  # type: ignore[method-assign]
    result = search(world)
    assert world.counts == (1,)
    assert result.kept
    kept = json.loads((tmp_path / "results" / "ds_config.tuned.reasons.json").read_text())["kept"]
    assert "not a significant gain" in kept[KEY]


@pytest.mark.parametrize(
    ("more", "options", "said"),
    [
        ((OPTION, "2"), {}, "given on the command line"),
        pytest.param((), {"fix": (KEY,)}, "--fix", marks=pytest.mark.slow),
        ((), {"budget": 1e-9}, "the budget is spent"),
    ],
)
def test_why_they_stay(
    search: Search, words: list[str], tmp_path: Path, more: tuple[str, ...], options: dict[str, Any], said: str
) -> None:
    words += more
    world = Waiting()
    result = search(world, **options)
    assert change(result) is None
    kept = json.loads((tmp_path / "results" / "ds_config.tuned.reasons.json").read_text())["kept"]
    assert said in kept[KEY]
