"""Gathers by copies between GPUs give what NCCL gives, and leave nothing behind."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

from ds_hf.engine.comm import peers
from ds_hf.engine.zero.gather import GatheredParameters
from tests.gpu.test_overlap import data, engine_of, step
from tests.helpers.distributed import run_distributed
from tests.helpers.parity import full_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def train(stage: int, peer_copies: bool) -> tuple[dict[str, Tensor], int, list[float]]:
    peers.LEAST_COPIED_NBYTES = 0
    held = torch.cuda.memory_reserved()  # the symmetric memory's pool too; the device has other processes
    engine = engine_of(stage, width=512, ds_hf={"peer_copies": peer_copies})
    regions = [buffer.gathering.region for unit in engine.units for buffer in unit.buffers]
    assert all((region is not None) == (peer_copies and stage > 0) for region in regions), "no access between the GPUs"
    losses = []
    for number in range(12):
        losses.append(step(engine, data(256, 512, number)).item())
        if number == 5:
            with GatheredParameters(engine.module.parameters(), modifier_rank=1):
                if engine.axis.rank == 1:
                    for param in engine.module.parameters():
                        param.data.mul_(0.9)
    weights = {name: value.cpu() for name, value in full_weights(engine.module).items()}
    engine.destroy()
    del engine, regions
    gc.collect()  # parameters and their buffers know each other
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return weights, torch.cuda.memory_reserved() - held, losses


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_copies_and_nccl_are_equal(stage: int) -> None:
    by_nccl = run_distributed(train, 2, stage, False, timeout=120, backend="nccl")
    by_copies = run_distributed(train, 2, stage, True, timeout=120, backend="nccl")
    for (expected, _, losses), (found, _, others) in zip(by_nccl, by_copies, strict=True):
        assert losses == others
        for name, value in expected.items():
            assert torch.equal(found[name], value), name


def many(rounds: int) -> list[int]:
    """Memory that this process holds after each engine."""
    used = []
    for _ in range(rounds):
        train(3, True)
        used.append(torch.cuda.memory_reserved())
    return used


def test_memory_of_regions_is_given_back() -> None:
    for used in run_distributed(many, 2, 4, timeout=120, backend="nccl"):
        assert used[-1] <= used[1] + (4 << 20), used
