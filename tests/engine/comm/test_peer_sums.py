"""Sums of gradients by copies: right for any number of ranks, runs and rounds, also when ranks get out of step."""

from __future__ import annotations

import random
import time
from itertools import accumulate
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ds_hf.engine.comm.mesh import data_parallel_axis
from ds_hf.engine.comm.peer_sums import PeerSums
from tests.engine.comm.test_peers import peers_in_files
from tests.helpers.distributed import run_distributed

DTYPES = [torch.bfloat16, torch.float32, torch.float16]


def sums(folder: str) -> None:
    for slot_nbytes in (1, 4096, 1 << 20):
        check(f"{folder}/{slot_nbytes}", slot_nbytes)


def check(folder: str, slot_nbytes: int) -> None:
    axis = data_parallel_axis()
    rank, world_size = axis.rank, axis.world_size
    wait = random.Random(rank)

    def meet() -> None:
        time.sleep(0.003 * wait.random())
        dist.barrier()

    by_copies = PeerSums(axis, peers_in_files(axis, folder)._mapping, meet, slot_nbytes)
    for number in range(6):
        shard = 1 + 300 * number
        numel, dtype = world_size * shard, DTYPES[number % len(DTYPES)]
        generator = torch.Generator().manual_seed(number)
        given = torch.randn(world_size, numel, generator=generator).to(dtype)
        lengths = [length for length in (shard // 3, 1, shard // 2, shard // 7) if length]
        # a gap behind each run; ranks may have them in one piece or in two
        starts = list(accumulate((length + 2 for length in lengths), initial=0))[:-1]
        runs = [(start, min(start + length, numel)) for start, length in zip(starts, lengths, strict=True)]
        runs = [(start, end) for start, end in runs if start < end]
        covered = torch.zeros(numel)
        for start, end in runs:
            covered[start:end] = 1
        if rank == 1 and runs[0][1] > 1:
            runs[:1] = [(0, 1), (1, runs[0][1])]
        expected = torch.zeros(numel)
        for each in given:
            expected += each.float()
        expected *= covered
        own = slice(rank * shard, (rank + 1) * shard)
        pieces = [given[rank, start:end].clone() for start, end in runs]
        call = {"factor": 1 / world_size, "what": "gradients"}
        found = by_copies.reduce_scatter(pieces, tuple(runs), numel, **call)
        assert found.dtype is dtype
        expected *= 1 / world_size
        assert torch.equal(found, expected[own].to(dtype))
        before = torch.ones(shard, dtype=dtype) * covered[own].to(dtype)
        wide = by_copies.reduce_scatter(pieces, tuple(runs), numel, before=before, dtype=torch.float32, **call)
        assert torch.equal(wide, expected[own] + covered[own])
        again = by_copies.reduce_scatter(pieces, tuple(runs), numel, before=wide, dtype=torch.float32, **call)
        assert again is wide
        torch.testing.assert_close(again, 2 * expected[own] + covered[own])


@pytest.mark.parametrize("world_size", [2, 3])
def test_sums_are_those_of_fp32(tmp_path: Path, world_size: int) -> None:
    for slot_nbytes in (1, 4096, 1 << 20):
        (tmp_path / str(slot_nbytes)).mkdir()
    run_distributed(sums, world_size, str(tmp_path))
