"""Checkpoints of version 1, as ds_hf wrote all of them before slices: a fixture of that code loads and goes on.

``data/format1.tar.xz`` was saved at commit 88fbf40 by two processes at stage 2 in fp16, after three steps; it holds
the sums of all states then and the losses of the three steps after.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_hf.checkpoint.manifest import read_manifest
from ds_hf.checkpoint.verify import verify
from ds_hf.checkpoint.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.engine.checkpoint.workload import config, engine_of, states, train
from tests.helpers.archives import unpack
from tests.helpers.distributed import run_distributed

FIXTURE = Path(__file__).parent / "data" / "format1.tar.xz"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("format1")
    unpack(FIXTURE, place)
    return place


def _load(folder: Path, stage: int) -> tuple[dict[str, float], list[float], dict[str, Any]]:
    with engine_of(config(stage, "fp16"), seed=7) as engine:
        _, client = engine.load_checkpoint(folder)
        sums = {k: v.double().sum().item() for k, v in states(engine).items() if isinstance(v, torch.Tensor)}
        return sums, train(engine, 3, 3), client


@pytest.mark.parametrize(("world_size", "stage"), [(2, 2), (1, 3)])
def test_it_loads_and_goes_on(folder: Path, world_size: int, stage: int) -> None:
    expected = json.loads((folder / "expected.json").read_text())
    sums, losses, client = run_distributed(_load, world_size, folder, stage, timeout=30)[0]
    assert sums == pytest.approx(expected["sums"], rel=1e-12)
    assert losses == pytest.approx(expected["losses"], rel=2e-2 if world_size == 1 else 1e-6)
    assert client == {"epoch": 3, "note": "kept"}


def test_it_is_whole(folder: Path) -> None:
    assert verify(folder) == []
    assert read_manifest(folder / "global_step3").extra["version"] == 1
    sums = json.loads((folder / "expected.json").read_text())["sums"]
    found = get_fp32_state_dict_from_zero_checkpoint(folder)
    assert found["blocks.1.linear.weight"].double().sum().item() == sums["blocks.1.linear.weight/master"]


def _save(folder: Path) -> None:
    with engine_of(config(2, "fp16")) as engine:
        train(engine, 3)
        engine.save_checkpoint(folder)


def test_without_slices_the_same_is_written_today(folder: Path, tmp_path: Path) -> None:
    """Older versions of ds_hf read what this one saves of a model that is not cut."""
    run_distributed(_save, 2, tmp_path, timeout=30)
    then, now = (json.loads((place / "global_step3/manifest.json").read_text()) for place in (folder, tmp_path))
    assert list(now) == list(then)
    assert now["optimizer"].pop("library") == "torch"
    for key in ("format", "version", "world_size", "parameters", "excluded", "tied", "buffers", "groups", "optimizer"):
        assert now[key] == then[key], key
    assert now["digest"].keys() == then["digest"].keys()
    assert now["digest"]["tensors"].keys() == then["digest"]["tensors"].keys()
