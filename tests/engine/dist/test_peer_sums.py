"""Sums of gradients by copies: right for any number of ranks and pieces, also when ranks get out of step."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ds_hf.engine.dist.mesh import data_parallel_axis
from ds_hf.engine.dist.peer_sums import PeerSums
from tests.engine.dist.test_peers import peers_in_files
from tests.helpers.distributed import run_distributed


def sums(folder: str, slot_nbytes: int, dtypes: list[torch.dtype]) -> None:
    axis = data_parallel_axis()
    rank, world_size = axis.rank, axis.world_size
    wait = random.Random(rank)

    def meet() -> None:
        time.sleep(0.003 * wait.random())
        dist.barrier()

    by_copies = PeerSums(axis, peers_in_files(axis, folder)._mapping, meet, slot_nbytes)
    for number in range(6):
        numel = world_size * (1 + 700 * number)
        dtype = dtypes[number % len(dtypes)]
        generator = torch.Generator().manual_seed(number)
        given = torch.randn(world_size, numel, generator=generator).to(dtype)
        expected = torch.zeros(numel)
        for each in given:
            expected += each.float()
        own = slice(rank * numel // world_size, (rank + 1) * numel // world_size)
        found = by_copies.reduce_scatter(given[rank].clone(), 1 / world_size, "gradients")
        assert found.dtype is dtype
        assert torch.equal(found, (expected * (1 / world_size))[own].to(dtype))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("slot_nbytes", [1, 4096, 1 << 20])
def test_sums_are_those_of_fp32(tmp_path: Path, world_size: int, slot_nbytes: int) -> None:
    run_distributed(sums, world_size, str(tmp_path), slot_nbytes, [torch.bfloat16, torch.float32, torch.float16])
