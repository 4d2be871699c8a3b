"""All-to-alls of activations by copies: right for any strides, sizes and number of ranks, also when ranks get out of
step, and some are begun and not ended."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_hf.engine.comm.mesh import Axis, data_parallel_axis
from ds_hf.engine.comm.peer_exchanges import PeerExchanges
from ds_hf.engine.comm.streams import CommStream
from ds_hf.engine.parallel.sequence.exchange import Exchange, _run_copies
from ds_hf.errors import DsHfError
from tests.engine.comm.test_peers import peers_in_files
from tests.helpers.distributed import run_distributed

DTYPES = [torch.bfloat16, torch.float32, torch.float64, torch.float16]


def exchanges_in_files(axis: Axis, folder: str) -> PeerExchanges:
    wait = random.Random(axis.rank)

    def meet() -> None:
        time.sleep(0.003 * wait.random())
        dist.barrier()

    return PeerExchanges(axis, peers_in_files(axis, folder)._mapping, meet, CommStream())


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DTYPES[seed % len(DTYPES)])


def all_of_them(folder: str) -> None:
    axis = data_parallel_axis()
    rank, ranks = axis.rank, axis.world_size
    copies = exchanges_in_files(axis, folder)
    for number in range(8):  # pieces that grow and shrink, of 16-byte words and not
        heads, tokens, dim = ranks * (2 + number % 3), 2 + (5 * number) % 7, (8, 5, 16)[number % 3]
        whole = [drawn(number, 2, ranks * tokens, heads, dim).transpose(1, 2) for _ in range(3)]
        whole[1] = whole[1].contiguous()
        mine = [each.chunk(ranks, 2)[rank] for each in whole]
        count = axis.log.count
        found = _run_copies(mine, [Exchange(cut=1, join=2)] * 3, copies, "heads")
        assert axis.log.count == count + 1
        for each, got, given in zip(whole, found, mine, strict=True):
            assert torch.equal(got, each.chunk(ranks, 1)[rank])
            assert (got.stride(1) < got.stride(2)) == (given.stride(1) < given.stride(2)), "laid as what was given"
        parts = mine[0].unflatten(1, (ranks, -1)).movedim(1, 0)
        started = [copies.start([parts], [torch.empty_like(parts)], "heads") for _ in range(number)]
        if len(started) > 4:  # as many as slots; what a checkpoint begins and does not end gives way
            with pytest.raises(DsHfError, match="too many were under way"):
                copies.finish(started[0])
        back = _run_copies(found[:1], [Exchange(cut=2, join=1)], copies, "context")
        assert torch.equal(back[0], mine[0])


@pytest.mark.parametrize("ranks", [2, 3])
def test_they_give_what_collectives_do(tmp_path: Path, ranks: int) -> None:
    run_distributed(all_of_them, ranks, str(tmp_path))
