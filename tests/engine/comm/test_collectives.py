"""What gathers and sums give, whichever way they go: gloo's collectives, an exchange of two, copies between peers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_hf.engine.comm import collectives
from ds_hf.engine.comm.mesh import Axis, data_parallel_axis
from ds_hf.engine.comm.streams import CommStream
from tests.engine.comm.test_peers import peers_in_files
from tests.helpers.distributed import run_distributed

N = 60  # elements of a shard
LARGE = 3 << 20  # of one that two processes do not exchange (gloo's own sum)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Gather = Callable[[Tensor, Axis], Tensor]


def value_of(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Whole numbers below 64, so that sums of a few are exact in 16 bits."""
    return ((torch.arange(numel) * 7 + rank * 13) % 64).to(dtype)


# -- gathers ----------------------------------------------------------------------------------------------------------


def gathered(shard: Tensor, axis: Axis) -> Tensor:
    full = shard.new_empty(axis.world_size * shard.numel())
    collectives.all_gather(full, shard, axis)
    return full


def gathered_in_place(shard: Tensor, axis: Axis) -> Tensor:
    full = shard.new_empty(axis.world_size * shard.numel())
    mine = full.view(axis.world_size, -1)[axis.rank].copy_(shard)
    collectives.all_gather(full, mine, axis)
    return full


def gathered_under_way(shard: Tensor, axis: Axis) -> Tensor:
    full, stream = shard.new_empty(axis.world_size * shard.numel()), CommStream()
    collectives.all_gather(full, shard, axis, "a test's", stream)
    stream.arrive()
    return full


def gathered_with_others(shard: Tensor, axis: Axis) -> Tensor:
    fulls = [shard.new_empty(axis.world_size * shard.numel()) for _ in range(3)]
    collectives.all_gather_each(fulls, [shard + 1, shard, shard + 2], axis, ["a", "b", "c"])
    return fulls[1]


GATHERS: tuple[Gather, ...] = (gathered, gathered_in_place, gathered_under_way, gathered_with_others)


def gathers_of(axis: Axis, folder: str) -> None:
    for dtype in DTYPES:
        expected = torch.cat([value_of(rank, N, dtype) for rank in range(axis.world_size)])
        for gather in GATHERS:
            assert torch.equal(gather(value_of(axis.rank, N, dtype), axis), expected), (gather.__name__, dtype)
        peers = peers_in_files(axis, f"{folder}/{dtype}")
        region = peers.region(N, dtype)
        region.writing()
        region.mine.copy_(value_of(axis.rank, N, dtype))
        full = torch.empty(axis.world_size * N, dtype=dtype)
        region.gather(full.chunk(axis.world_size), region.theirs, "a test's")
        assert torch.equal(full, expected), ("peers", dtype)


# -- sums -------------------------------------------------------------------------------------------------------------


def sums_of(axis: Axis) -> None:
    world = axis.world_size
    for dtype in DTYPES:
        for numel in (N, LARGE) if dtype is torch.float32 else (N,):
            for scatter in (True, False):
                for stream in (None, CommStream()):
                    check_sum(axis, numel * world, dtype, scatter, stream, 1.0, 1.0)
    check_sum(axis, N * world, torch.float32, True, CommStream(), 0.5, 1.0)
    check_sum(axis, N * world, torch.float32, False, CommStream(), 0.5, 4.0)


def check_sum(
    axis: Axis, numel: int, dtype: torch.dtype, scatter: bool, stream: CommStream | None, before: float, after: float
) -> None:
    result = collectives.reduce_gradient(
        value_of(axis.rank, numel, dtype), axis, scatter=scatter, scale_before=before, scale_after=after,
        what="a test's", comm_stream=stream,
    )  # fmt: skip
    if stream is not None:
        stream.arrive()
    total = torch.stack([value_of(rank, numel, dtype) for rank in range(axis.world_size)]).float().sum(0)
    expected = (total * before * after).to(dtype)
    if scatter:
        expected = expected.view(axis.world_size, -1)[axis.rank]
    assert torch.equal(result, expected), (numel, dtype, scatter, stream, before, after)


# -- everything -------------------------------------------------------------------------------------------------------


def everything(folder: str) -> None:
    axis = data_parallel_axis()
    for dtype in DTYPES:
        (Path(folder) / str(dtype)).mkdir(exist_ok=True)
    dist.barrier()
    gathers_of(axis, folder)
    sums_of(axis)
    value = torch.tensor([1.0 + axis.rank, -axis.rank])
    collectives.all_reduce_sum(value, axis)
    assert value.tolist() == [sum(range(1, axis.world_size + 1)), -sum(range(axis.world_size))]
    most = torch.tensor([float(axis.rank), -float(axis.rank)])
    collectives.all_reduce_max(most, axis)
    assert most.tolist() == [axis.world_size - 1, 0.0]
    sent = torch.full((3,), float(axis.rank))
    collectives.broadcast(sent, axis, axis.world_size - 1, "a test's")
    assert sent.tolist() == [axis.world_size - 1.0] * 3


@pytest.mark.parametrize("world", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_every_way_gives_the_same(tmp_path: Path, world: int) -> None:
    run_distributed(everything, world, str(tmp_path), timeout=60)
