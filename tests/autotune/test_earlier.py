"""A search begins with what earlier ones of the same model on the same machine measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_hf.autotune.options import Metric
from ds_hf.autotune.records import value_of
from ds_hf.autotune.result import Result
from tests.autotune.world import MIB, World

Search = Callable[..., Result]
MEMORY = 900 * MIB


class Slower(World):
    """The same machine on a day on which everything takes twice as long."""

    def seconds(self, *args: Any) -> float:
        return 2 * super().seconds(*args)


class Changed(World):
    """A machine on which checkpointing costs more since then, and the compiler gains nothing."""

    def seconds(self, stage: int, checkpointing: bool, compiled: bool, micro: int, steps: int) -> float:
        whole = super().seconds(stage, checkpointing, False, micro, steps)
        return whole * (1.6 if checkpointing else 1) * (1.3 if compiled else 1)


def pace(result: Result) -> float:
    return value_of(result.best[1], Metric.THROUGHPUT)


def file_of(tmp_path: Path) -> Path:
    (found,) = (tmp_path / "cache" / "ds_hf" / "autotune").iterdir()
    return found


@pytest.mark.parametrize("kind", [World, Slower])
def test_fewer_launches_find_as_much(search: Search, tmp_path: Path, kind: type[World]) -> None:
    first = World(memory=MEMORY)
    best = search(first)
    again = kind(memory=MEMORY)
    found = search(again, results_dir=tmp_path / "again")
    assert len(again.launched) < len(first.launched)
    slower = 2 if kind is Slower else 1
    assert pace(found) * slower >= 0.99 * pace(best)
    setting = best.best[0].setting
    wanted = [setting[name] for name in ("zero_optimization.stage", "gradient_checkpointing")]
    tried = [[launch[name] for name in ("stage", "checkpointing")] for launch in again.launched]
    assert wanted in tried[1:3]  # what was best comes first, or after what needs no start


def test_what_is_no_longer_so_is_dropped(search: Search, tmp_path: Path) -> None:
    search(World(memory=MEMORY))
    changed = Changed(memory=MEMORY)
    found = search(changed, results_dir=tmp_path / "again")
    assert pace(found) >= 0.95 * max(changed.grid().values())


def test_another_model_and_what_is_forgotten_begin_anew(search: Search, tmp_path: Path) -> None:
    first = World(memory=MEMORY)
    search(first)
    other = World(memory=MEMORY, numel=2 * World.numel)
    search(other, results_dir=tmp_path / "other")
    assert len(list((tmp_path / "cache" / "ds_hf" / "autotune").iterdir())) == 2
    anew = World(memory=MEMORY)
    search(anew, results_dir=tmp_path / "anew", forget=True)
    assert anew.launched == first.launched


@pytest.mark.parametrize("text", ["", "[]", '{"version": 1, "points": [["a", [1, 1], 1.0, 0.1]]}', '{"version": 0}'])
def test_a_file_of_something_else_counts_as_empty(search: Search, tmp_path: Path, text: str) -> None:
    first = World(memory=MEMORY)
    search(first)
    file_of(tmp_path).write_text(text)
    again = World(memory=MEMORY)
    search(again, results_dir=tmp_path / "again")
    assert again.launched == first.launched
    tree = json.loads(file_of(tmp_path).read_text())
    assert tree["version"] == 1
    assert len(tree["points"]) > 4
