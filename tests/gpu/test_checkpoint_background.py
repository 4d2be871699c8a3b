"""Checkpoints of a GPU in the background: page-locked copies, digests summed on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ds_hf.checkpoint.checksum import sum_of_tensor
from ds_hf.checkpoint.verify import verify
from tests.engine.checkpoint.workload import config, differences, engine_of, states
from tests.helpers.distributed import run_distributed

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("numel", [1, 15, 2**20 + 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_sums_on_the_device_are_those_of_the_host(numel: int, dtype: torch.dtype) -> None:
    values = torch.randn(numel).mul(100).to(dtype)
    assert sum_of_tensor(values.cuda(), 16) == sum_of_tensor(values, 16)
    assert sum_of_tensor(values.cuda()[1:]) == sum_of_tensor(values[1:].clone())


def _save_and_load(folder: Path) -> list[tuple[list[str], list[str], bool]]:
    found = []
    for stage, dtype in ((2, "bf16"), (3, "bf16"), (2, "bf16offload"), (1, "fp16")):
        place = folder / f"{stage}{dtype}"
        with engine_of(config(stage, dtype, ds_hf={"checkpoint": {"async": True}})) as engine:
            _train(engine, 2)
            before = states(engine)
            engine.save_checkpoint(place)
            pinned = engine.checkpoint_writer._copy.memory.is_pinned()
            _train(engine, 3)
            engine.wait_for_checkpoint()
            faults = verify(place)
            engine.load_checkpoint(place)
            found.append((differences(before, states(engine)), faults, pinned))
    return found


def _train(engine: Any, steps: int) -> None:
    for _ in range(steps):
        loss = engine(torch.randint(0, 11, (2, 5), device=engine.device))
        engine.backward(loss)
        engine.step()


@pytest.mark.parametrize("world_size", [1, 2])
def test_saved_in_the_background_and_loaded(tmp_path: Path, world_size: int) -> None:
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs")
    for rank in run_distributed(_save_and_load, world_size, tmp_path, backend="nccl", timeout=100):
        assert [(different, faults) for different, faults, _ in rank] == [([], [])] * 4
        assert all(pinned for _, _, pinned in rank)
