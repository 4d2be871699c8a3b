"""Optimizer states and parameters in host memory while the model computes on a CUDA device."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from ds_hf import initialize
from tests.contract.test_parity import ADAMW, MICRO, batches, model
from tests.helpers.distributed import run_distributed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def train_twice(stage: int, offload: dict[str, Any], dtype: str) -> tuple[list[float], set[str], int]:
    """Losses, the devices of masters, and the bytes by which the second engine left more allocated than the first."""
    losses, devices = train(stage, offload, dtype)
    gc.collect()
    first = torch.cuda.memory_allocated()  # cuBLAS took its workspaces
    train(stage, offload, dtype)
    gc.collect()
    return losses, devices, torch.cuda.memory_allocated() - first


def train(stage: int, offload: dict[str, Any], dtype: str) -> tuple[list[float], set[str]]:
    """Losses of one run, and the devices of its masters."""
    trained = model()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},  # type: ignore[call-overload]
        "zero_optimization": {"stage": stage, **offload},
        "ds_hf": {"offload": {"stream": 0.0}},
    }
    if dtype != "fp32":
        config[dtype] = {"enabled": True}
    engine, *_ = initialize(model=trained, config=config)
    losses = []
    for step in batches(4, torch.distributed.get_world_size()):
        for micro in step:
            loss = engine(micro[torch.distributed.get_rank()].to(engine.device))
            engine.backward(loss)
            engine.step()
        losses.append(loss.item())
        del loss
    devices = {master.device.type for master in engine.optimizer.masters.values()}
    engine.destroy()
    return losses, devices


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("world", [1, 2])
def test_offload_changes_no_number_but_the_last_bits(world: int, dtype: str) -> None:
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} CUDA devices, found {torch.cuda.device_count()}")
    cpu = {"device": "cpu"}
    plain = run_distributed(train_twice, world, 2, {}, dtype, timeout=120, backend="nccl")
    for stage, offload in [
        (1, {"offload_optimizer": cpu}),
        (2, {"offload_optimizer": cpu}),
        (3, {"offload_optimizer": cpu}),
        (3, {"offload_optimizer": cpu, "offload_param": cpu}),
    ]:
        results = run_distributed(train_twice, world, stage, offload, dtype, timeout=120, backend="nccl")
        for (losses, devices, kept), (expected, _, _) in zip(results, plain, strict=True):
            assert losses == pytest.approx(expected, rel=1e-5 if dtype == "fp32" else 1e-2)
            assert devices == {"cpu"}
            # With two processes a stream of its own takes the norms, whose kernel keeps its messages on it; and torch
            # keeps a kilobyte of each region that others read.
            assert kept <= (0 if world == 1 else 1 << 18), (stage, offload)
