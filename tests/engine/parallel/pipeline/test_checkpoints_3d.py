"""Checkpoints from any (stages, tensor, data, ZeRO stage) to any other, in our format and in DeepSpeed's."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ds_hf import initialize
from ds_hf.checkpoint.deepspeed.write import Target, write_deepspeed
from ds_hf.checkpoint.deepspeed.write_universal import write_universal
from ds_hf.checkpoint.formats import open_source
from ds_hf.checkpoint.manifest import read_manifest
from ds_hf.checkpoint.verify import verify
from ds_hf.deepspeed_api.pipeline import PipelineModule
from ds_hf.engine.parallel.pipeline.grid import PipelineParallelGrid
from ds_hf.engine.parallel.pipeline.specs import LayerSpec, TiedLayerSpec
from ds_hf.engine.parallel.pipeline.topology import PipeModelDataParallelTopology
from tests.engine.checkpoint.workload import on_both
from tests.engine.parallel.pipeline.models import SEED, Embedding, cross_entropy, project
from tests.engine.parallel.pipeline.test_checkpoints import STEPS, steps_of
from tests.engine.parallel.pipeline.test_variants import DividedMlp
from tests.helpers.distributed import run_distributed

Cell = tuple[int, int, int, int]  # stages, tensor, data, ZeRO stage


def make(cell: Cell, shift: int = 0) -> Any:
    stages, tensor, data, stage = cell
    topology = PipeModelDataParallelTopology(stages, tensor, data)
    grid = PipelineParallelGrid(topology)
    DividedMlp.parts, DividedMlp.part = tensor, grid.get_slice_parallel_rank()
    DividedMlp.group = grid.get_slice_parallel_group()
    layers = [
        TiedLayerSpec("embed", Embedding),
        *[LayerSpec(DividedMlp) for _ in range(4)],
        TiedLayerSpec("embed", Embedding, forward_fn=project),
    ]
    module = PipelineModule(
        layers,
        topology=topology,
        loss_fn=cross_entropy,
        seed_layers=True,
        base_seed=SEED + shift,
        partition_method="uniform",
    )
    module.seed_layers = False
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4 // data,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
        "gradient_clipping": 0.5,
    }
    return initialize(model=module, config=settings)[0]


def save(folder: Path, cell: Cell) -> dict[str, Any]:
    """Ours, and of it DeepSpeed's formats, written by the first process."""
    engine = make(cell)
    steps_of(engine, 0, STEPS)
    engine.save_checkpoint(folder / "own", "a", {"note": 7})
    if dist.get_rank() == 0:
        source = open_source(folder / "own", "a")
        write_universal(source, folder / "universal" / "a")
        write_deepspeed(source, folder / "deepspeed", Target(2, 3), "a")
    dist.barrier()
    losses = steps_of(engine, STEPS, 2)
    engine.destroy()
    return {"losses": losses}


def load(folder: Path, again: Path, cell: Cell) -> dict[str, Any]:
    engine = make(cell, shift=50)
    _, client = engine.load_checkpoint(folder, "a")
    steps = engine.global_steps
    engine.save_checkpoint(again, "a")
    losses = steps_of(engine, STEPS, 2)
    engine.destroy()
    return {"losses": losses, "client": client, "steps": steps}


def run(root: Path, first: Cell, others: list[tuple[str, Cell]], world: int) -> None:
    agains = {other: root / f"again-{number}" for number, other in enumerate(others)}
    calls: list[Any] = [(save, (root, first))]
    calls += [(load, (root / kind, again, cell)) for (kind, cell), again in agains.items()]
    ranks = run_distributed(on_both, world, calls, timeout=60 * len(calls))
    digest = read_manifest(root / "own" / "a").extra["digest"]["tensors"]
    assert digest
    for saved, *loaded in ranks:
        for (other, again), found in zip(agains.items(), loaded, strict=True):
            assert found["losses"] == pytest.approx(saved["losses"], rel=1e-5), other
            assert (found["client"], found["steps"]) == ({"note": 7}, STEPS)
            assert read_manifest(again / "a").extra["digest"]["tensors"] == digest, other
            assert verify(again, "a") == []


def test_to_other_divisions(tmp_path: Path) -> None:
    others = [("own", (1, 2, 2, 2)), ("universal", (4, 1, 1, 0)), ("deepspeed", (2, 1, 2, 1))]
    run(tmp_path, (2, 2, 1, 1), others, 4)


MESHES = [(2, 2, 1), (2, 1, 2), (1, 2, 2), (4, 1, 1), (1, 1, 4)]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("mesh", MESHES)
def test_the_matrix(tmp_path: Path, mesh: tuple[int, int, int], stage: int) -> None:
    """From each to each other, the ZeRO stages in turn, in each format."""
    kinds, stages = itertools.cycle(["own", "universal", "deepspeed", "own"]), itertools.cycle([0, 1, 2])
    run(tmp_path, (*mesh, stage), [(next(kinds), (*other, next(stages))) for other in MESHES for _ in range(2)], 4)


@pytest.mark.slow
def test_all_three_dimensions(tmp_path: Path) -> None:
    """Eight processes."""
    others = [("own", (2, 1, 4, 2)), ("universal", (4, 2, 1, 1)), ("deepspeed", (2, 2, 2, 0)), ("own", (1, 2, 4, 1))]
    run(tmp_path, (2, 2, 2, 1), others, 8)
