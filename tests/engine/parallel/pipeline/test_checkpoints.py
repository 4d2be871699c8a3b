"""Checkpoints of pipelines load at every other number of stages, pipelines and ZeRO stage, and give whole models."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_hf import initialize
from ds_hf.checkpoint.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from ds_hf.deepspeed_api.checkpoint_engine import TorchCheckpointEngine
from ds_hf.errors import CheckpointError
from tests.engine.parallel.pipeline.models import batches, pairs, pipeline
from tests.helpers.distributed import run_distributed

Mesh = tuple[int, int, int]  # stages, pipelines, ZeRO stage
STEPS = 3


def make(mesh: Mesh, **options: Any) -> Any:
    stages, pipelines, stage = mesh
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4 // pipelines,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
    }
    torch.manual_seed(dist.get_rank())
    return initialize(model=pipeline(True, stages, **options), config=settings)[0]


def steps_of(engine: Any, first: int, count: int) -> list[float]:
    """Losses; the four micro-batches of a step are shared out over the pipelines."""
    found = []
    for tokens in batches(first + count, 4)[first:]:
        shared = tokens.to(engine.device).view(-1, engine.mesh.shape.data, *tokens.shape[2:])
        found.append(float(engine.train_batch(pairs(shared, engine.mesh.sample_rank))))
    return found


def save(folder: str, mesh: Mesh, **options: Any) -> dict[str, Any]:
    engine = make(mesh, **options)
    steps_of(engine, 0, STEPS)
    engine.save_checkpoint(folder, "a", {"note": 7})
    whole = engine._zero3_consolidated_16bit_state_dict()
    engine.save_16bit_model(folder, "whole.safetensors")
    losses = steps_of(engine, STEPS, 2)
    engine.destroy()
    return {"losses": losses, "whole": whole}


def load(folder: str, mesh: Mesh, **options: Any) -> dict[str, Any]:
    engine = make(mesh, **options)
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


@pytest.mark.slow
@pytest.mark.parametrize("folds", [(True, False), (False, True), (True, True)])
def test_folded_pipelines_save_and_load_as_others(folds: tuple[bool, bool], tmp_path: Path) -> None:
    options: list[dict[str, Any]] = [{"chunks": 2, "folded": True} if fold else {} for fold in folds]
    wanted = run_distributed(save, 2, str(tmp_path), (2, 1, 1), timeout=90, **options[0])
    for one in run_distributed(load, 2, str(tmp_path), (2, 1, 1), timeout=90, **options[1]):
        assert one["losses"] == pytest.approx(wanted[0]["losses"], rel=1e-5)
    masters = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert all(torch.equal(wanted[0]["whole"][name], value) for name, value in masters.items())


def in_files(folder: str, files: str, mesh: Mesh, *, resume: bool) -> list[float]:
    """Losses of a run whose optimizer states lie in files, up to a checkpoint or from it on."""
    stages, pipelines, stage = mesh
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4 // pipelines,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "nvme" if files else "cpu"}},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }
    if files:
        settings["zero_optimization"]["offload_optimizer"]["nvme_path"] = files  # type: ignore[index]
    torch.manual_seed(dist.get_rank() + resume)
    engine = initialize(model=pipeline(True, stages), config=settings)[0]
    if resume:
        engine.load_checkpoint(folder)
        losses = steps_of(engine, STEPS, 2)
    else:
        losses = steps_of(engine, 0, STEPS)
        engine.save_checkpoint(folder)
        losses += steps_of(engine, STEPS, 2)
    assert not files or any(path.stat().st_size for path in Path(files).rglob("*") if path.is_file())
    engine.destroy()
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(2, 1, 1), (2, 1, 2), (2, 2, 1), (2, 2, 2)])
def test_optimizer_states_in_files(mesh: Mesh, tmp_path: Path) -> None:
    """As in host memory, to the bit; a checkpoint goes on with them, also in another division."""
    files, folder = tmp_path / "files", tmp_path / "checkpoint"
    files.mkdir()
    world = mesh[0] * mesh[1]
    wanted = run_distributed(in_files, world, str(tmp_path / "plain"), "", mesh, resume=False, timeout=60)
    found = run_distributed(in_files, world, str(folder), str(files), mesh, resume=False, timeout=60)
    assert found == wanted
    resumed = run_distributed(in_files, world, str(folder), str(files), mesh, resume=True, timeout=60)
    assert resumed == [losses[STEPS:] for losses in found]
    elsewhere = run_distributed(in_files, 1, str(folder), str(files), (1, 1, 1), resume=True, timeout=60)
    assert elsewhere[0] == pytest.approx(found[0][STEPS:], rel=5e-3)


def layers_in_files(folder: str) -> None:
    """Two stages write their layers; one stage reads all of them."""
    engine = TorchCheckpointEngine()
    torch.manual_seed(1)
    two = pipeline(True, 2)
    two.save_state_dict(folder, engine)
    dist.barrier()
    wanted = [None, None]
    dist.all_gather_object(wanted, two.state_dict())
    one = pipeline(True, 1)
    one.load_state_dir(folder, engine)
    assert all(torch.equal(value, (wanted[0] | wanted[1])[name]) for name, value in one.state_dict().items())
    first = two.layer_ids[0]
    assert two.ckpt_layer_path(folder, 0) == f"{folder}/layer_{first:02d}-model_states.pt"
    assert two.ckpt_layer_path_list(folder, 0) == [two.ckpt_layer_path(folder, 0)]
    assert two.ckpt_prefix(folder, "step7") == f"{folder}/step7/module-pipe_{two.stage_id:02d}"
    with pytest.raises(
        CheckpointError, match=r"no .*layer_00-model_states.pt; nothing of this layer is in that folder"
    ):
        one.load_state_dir(f"{folder}/none", engine)
    copied = Path(shutil.copytree(folder, f"{folder}-{dist.get_rank()}"))
    here, other = sorted(copied.glob("layer_*"))[:2]
    shutil.copy(other, here)
    with pytest.raises(CheckpointError, match=f"{here} is damaged, or of another layer or save"):
        one.load_state_dir(str(copied), engine)


def test_layers_in_files_of_their_own(tmp_path: Path) -> None:
    run_distributed(layers_in_files, 2, str(tmp_path), timeout=20)
    assert {path.name.lstrip(".")[:5] for path in tmp_path.iterdir()} == {"layer"}


def layers_of_two_saves(folder: str) -> list[str]:
    """The second save of one process ends, that of the other is killed before its second file; then both end."""
    engine, heard = TorchCheckpointEngine(), []
    two = pipeline(True, 2)
    if two.stage_id == 0:
        for name in ("layer_00-model_01-model_states.pt", "layer_77-model_states.pt"):
            Path(folder, name).touch()
    dist.barrier()
    two.save_state_dict(folder, engine)
    two.load_state_dir(folder, engine)  # perhaps before the other has written all
    written = 0

    class Killed(TorchCheckpointEngine):
        def save(self, state_dict: dict[str, Any], path: str) -> None:
            nonlocal written
            written += 1
            if two.stage_id == 1 and written == 2:
                raise KeyboardInterrupt
            super().save(state_dict, path)

    dist.barrier()
    with contextlib.suppress(KeyboardInterrupt):
        two.save_state_dict(folder, Killed())
    dist.barrier()
    try:
        two.load_state_dir(folder, engine)
    except CheckpointError as error:
        heard.append(str(error))
    dist.barrier()
    two.save_state_dict(folder, engine)
    dist.barrier()
    two.load_state_dir(folder, engine)
    return heard


def test_layers_of_two_saves_are_refused(tmp_path: Path) -> None:
    for heard in run_distributed(layers_of_two_saves, 2, str(tmp_path), timeout=20):
        assert len(heard) == 1
        assert re.search(r"layer_\d\d-model_states.pt and layer_\d\d-model_states.pt are of two saves", heard[0])
    assert not {"layer_00-model_01-model_states.pt", "layer_77-model_states.pt"} & set(os.listdir(tmp_path))
