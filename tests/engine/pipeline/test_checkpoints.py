"""Checkpoints of pipelines load at every other number of stages, pipelines and ZeRO stage, and give whole models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_hf import initialize
from ds_hf.engine.checkpoint.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.engine.pipeline.models import batches, pairs, pipeline
from tests.helpers.distributed import run_distributed

Mesh = tuple[int, int, int]  # stages, pipelines, ZeRO stage
STEPS = 3


def make(mesh: Mesh) -> Any:
    stages, pipelines, stage = mesh
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4 // pipelines,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
    }
    torch.manual_seed(dist.get_rank())
    return initialize(model=pipeline(True, stages), config=settings)[0]


def steps_of(engine: Any, first: int, count: int) -> list[float]:
    """Losses; the four micro-batches of a step are shared out over the pipelines."""
    found = []
    for tokens in batches(first + count, 4)[first:]:
        shared = tokens.view(-1, engine.mesh.shape.data, *tokens.shape[2:])
        found.append(float(engine.train_batch(pairs(shared, engine.mesh.sample_rank))))
    return found


def save(folder: str, mesh: Mesh) -> dict[str, Any]:
    engine = make(mesh)
    steps_of(engine, 0, STEPS)
    engine.save_checkpoint(folder, "a", {"note": 7})
    whole = engine._zero3_consolidated_16bit_state_dict()
    engine.save_16bit_model(folder, "whole.safetensors")
    losses = steps_of(engine, STEPS, 2)
    engine.destroy()
    return {"losses": losses, "whole": whole}


def load(folder: str, mesh: Mesh) -> dict[str, Any]:
    engine = make(mesh)
    _, client = engine.load_checkpoint(folder)
    assert client == {"note": 7}
    assert engine.global_steps == STEPS
    losses = steps_of(engine, STEPS, 2)
    engine.destroy()
    return {"losses": losses}


MESHES: list[Mesh] = [(1, 1, 0), (2, 1, 1), (2, 2, 1), (4, 1, 0), (2, 2, 2), (1, 2, 2)]


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ((2, 2, 1), (4, 1, 0)),
        *(
            pytest.param(one, two, marks=pytest.mark.slow)
            for one in MESHES
            for two in MESHES
            if (one, two) != ((2, 2, 1), (4, 1, 0))
        ),
    ],
)
def test_any_division_loads_any_other(saved: Mesh, loaded: Mesh, tmp_path: Path) -> None:
    wanted = run_distributed(save, saved[0] * saved[1], str(tmp_path), saved, timeout=90)
    found = run_distributed(load, loaded[0] * loaded[1], str(tmp_path), loaded, timeout=90)
    exact = saved == loaded
    for one in found:
        assert one["losses"] == (wanted[0]["losses"] if exact else pytest.approx(wanted[0]["losses"], rel=1e-5))
    whole = wanted[0]["whole"]
    assert all(other["whole"] is None for other in wanted[1:])
    masters = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert set(whole) == set(masters)
    assert {"tied_modules.embed.weight", "4.down.weight"} <= set(whole)
    assert all(torch.equal(whole[name], value) for name, value in masters.items())
    assert (tmp_path / "whole.safetensors").is_file()
