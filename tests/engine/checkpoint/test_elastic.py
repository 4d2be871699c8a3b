"""A checkpoint of any world size, stage, offload and dtype loads at any other: states exactly, next losses too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.checkpoint.workload import differences, load_and_train, on_both, save_trained
from tests.helpers.distributed import run_distributed

Cell = tuple[int, int, str]  # world size, stage, dtype

SAME_WORLD: list[tuple[Cell, Cell]] = [
    ((1, 0, "fp32"), (1, 0, "fp32")),
    ((1, 3, "bf16"), (1, 2, "bf16")),
    ((2, 0, "bf16"), (2, 0, "bf16")),
    ((2, 1, "fp16"), (2, 1, "fp16")),
    ((2, 2, "bf16"), (2, 2, "bf16")),
    ((2, 3, "fp32"), (2, 3, "fp32")),
    ((2, 3, "bf16"), (2, 1, "bf16")),
    ((2, 2, "bf16 offload"), (2, 3, "bf16 offload")),
]
OTHER_WORLD: list[tuple[Cell, Cell]] = [
    ((2, 3, "bf16"), (1, 0, "bf16")),
    ((2, 2, "bf16"), (1, 3, "bf16")),
    ((2, 1, "fp16"), (1, 2, "fp16")),
    ((1, 0, "fp32"), (2, 3, "fp32")),
    ((1, 3, "bf16"), (2, 1, "bf16")),
    ((2, 3, "fp32"), (1, 2, "fp32")),
]
OTHER_DTYPE: list[tuple[Cell, Cell]] = [
    ((2, 3, "bf16"), (2, 2, "fp32")),
    ((1, 0, "fp32"), (2, 3, "bf16")),
]
PAIRS = SAME_WORLD + OTHER_WORLD + OTHER_DTYPE


def _name(cell: Cell) -> str:
    world_size, stage, dtype = cell
    return f"world{world_size}-stage{stage}-{dtype.replace(' ', '-')}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """Every save, then every load, with the processes of each world size started once for each."""
    root = tmp_path_factory.mktemp("elastic")
    sources = list(dict.fromkeys(source for source, _ in PAIRS))
    results: dict[Any, Any] = {}
    for world_size in (1, 2):
        cells = [cell for cell in sources if cell[0] == world_size]
        calls = [(save_trained, (root / _name(cell), cell[1], cell[2])) for cell in cells]
        results.update(zip(cells, run_distributed(on_both, world_size, calls, timeout=60)[0], strict=True))
    for world_size in (1, 2):
        pairs = [pair for pair in PAIRS if pair[1][0] == world_size]
        calls = [(load_and_train, (root / _name(source), target[1], target[2])) for source, target in pairs]
        results.update(zip(pairs, run_distributed(on_both, world_size, calls, timeout=60)[0], strict=True))
    return results


@pytest.mark.parametrize(("source", "target"), SAME_WORLD, ids=lambda cell: _name(cell))
def test_resumed_run_is_the_uninterrupted_one(runs: dict[Any, Any], source: Cell, target: Cell) -> None:
    saved, loaded = runs[source], runs[source, target]
    assert differences(saved["states"], loaded["states"]) == []
    assert saved["losses"] == loaded["losses"]
    assert differences(saved["after"], loaded["after"]) == []


@pytest.mark.parametrize(("source", "target"), OTHER_WORLD, ids=lambda cell: _name(cell))
def test_other_world_size(runs: dict[Any, Any], source: Cell, target: Cell) -> None:
    saved, loaded = runs[source], runs[source, target]
    # samples are counted from the batch size, which the checkpoint's counter continues
    assert differences(saved["states"], loaded["states"]) == []
    tolerance = 1e-6 if "fp32" in source else 2e-2
    assert loaded["losses"] == pytest.approx(saved["losses"], rel=tolerance)


@pytest.mark.parametrize(("source", "target"), OTHER_DTYPE, ids=lambda cell: _name(cell))
def test_other_dtype_keeps_masters_and_moments(runs: dict[Any, Any], source: Cell, target: Cell) -> None:
    saved, loaded = runs[source]["states"], runs[source, target]["states"]
    masters = [key for key in saved if "/" in key]
    assert len(masters) == 3 * 10
    assert all(torch.equal(saved[key], loaded[key]) for key in masters)
    assert saved["steps"] == loaded["steps"] == [3.0]
    assert runs[source, target]["losses"] == pytest.approx(runs[source]["losses"], rel=3e-2)


def test_steps_really_change_the_states(runs: dict[Any, Any]) -> None:
    """The equalities above would hold for states that never move."""
    run = runs[(2, 3, "fp32")]
    changed = differences(run["states"], run["after"])
    assert "embedding.weight/master" in changed
    assert "embedding.weight/exp_avg_sq" in changed
    assert "blocks.0.calls" in changed
    assert "frozen" not in changed


def test_files_do_not_depend_on_stage(runs: dict[Any, Any], tmp_path: Path) -> None:
    """Replicated and sharded states are stored once, under the same keys and in the same shapes."""
    calls = [(save_trained, (tmp_path / str(stage), stage, "fp32")) for stage in range(4)]
    run_distributed(on_both, 2, calls, timeout=60)
    for rank in range(2):
        name = f"global_step3/rank_{rank:05d}.safetensors"
        contents = [(tmp_path / str(stage) / name).read_bytes() for stage in range(4)]
        headers = [json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]) for content in contents]
        assert all(header == headers[0] for header in headers)
        assert len({len(content) for content in contents}) == 1
    elements = 11 * 6 + 2 * (36 + 6 + 6 + 6) + 1
    total = sum((tmp_path / f"0/global_step3/rank_{rank:05d}.safetensors").stat().st_size for rank in range(2))
    assert 12 * elements < total < 24 * elements + 4000  # master and two moments once; gaps and headers
