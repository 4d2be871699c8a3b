"""Gathers by copies between GPUs give what NCCL gives, and leave nothing behind."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

from ds_hf.engine.comm import peers
from ds_hf.engine.comm.mesh import data_parallel_axis
from ds_hf.engine.comm.streams import CommStream
from ds_hf.engine.parallel.sequence.exchange import Exchange, _run_copies
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


def meetings(rounds: int) -> tuple[int, int, bool]:
    """Of as many gathers and sums beside products that keep every multiprocessor, elements that were wrong."""
    axis, device = data_parallel_axis(), torch.device("cuda", torch.cuda.current_device())
    stream, other = CommStream(device), CommStream(device)
    found = peers.open_peers(axis, device, stream)
    assert found is not None, "no access between the GPUs"
    sums, rank, numel = found.sums(), axis.rank, 3 << 20
    regions = [found.region(numel, torch.float32) for _ in range(2)]
    a = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    wrong = torch.zeros(2, dtype=torch.int64, device=device)
    targets = torch.empty(2 * numel, device=device)
    for number in range(rounds):
        region = regions[number % 2]
        region.writing()
        if (number + rank) % 3 == 0:
            a @ a  # one is later than the other
        region.mine.fill_(2 * number + rank)
        with stream:
            region.gather(targets.chunk(2), region.theirs, "a test's values")
        gradient = torch.full((2 * numel,), float(3 * number + rank), device=device)
        for _ in range(2):
            a @ a
        with other:
            total = sums.reduce_scatter([gradient], ((0, 2 * numel),), 2 * numel, factor=1.0, what="a test")
        stream.join()
        other.join()
        wrong[0] += (targets.view(2, -1) != torch.tensor([[2.0 * number], [2.0 * number + 1]], device=device)).sum()
        wrong[1] += (total != 6 * number + 1).sum()
    gathers, reductions = wrong.tolist()
    return gathers, reductions, peers._flushes(device)


def test_meetings_hold_what_comes_after_them() -> None:
    for gathers, reductions, flushes in run_distributed(meetings, 2, 400, timeout=120, backend="nccl"):
        print("flushes:", flushes)
        assert (gathers, reductions) == (0, 0)


def exchanges(rounds: int) -> int:
    """Of as many exchanges of activations beside products, elements that were wrong."""
    axis, device = data_parallel_axis(), torch.device("cuda", torch.cuda.current_device())
    found = peers.open_peers(axis, device, CommStream(device))
    assert found is not None, "no access between the GPUs"
    copies, rank, ranks = found.exchanges(), axis.rank, axis.world_size
    a = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    wrong = torch.zeros(1, dtype=torch.int64, device=device)
    for number in range(rounds):
        if (number + rank) % 3 == 0:
            a @ a  # one is later than the other
        tokens = 64 * (1 + number % 5)
        base = torch.arange(2 * tokens * ranks * 8 * 64, device=device).view(2, tokens, ranks * 8, 64) % 251
        mine = [(base + each + number + 7 * rank).to(torch.bfloat16).transpose(1, 2) for each in range(3)]
        got = _run_copies(mine, [Exchange(cut=1, join=2)] * 3, copies, "heads")
        del mine  # its memory is taken again while others may still be reading
        for each, result in enumerate(got):
            own = base[:, :, rank * 8 : (rank + 1) * 8]
            wanted = torch.cat([own + each + number + 7 * other for other in range(ranks)], 1)
            wrong += (result.transpose(1, 2) != wanted.to(torch.bfloat16)).sum()
    torch.cuda.synchronize()
    print("wrong:", wrong.tolist())
    return int(wrong.sum())


@pytest.mark.parametrize("ranks", [2, 4])
def test_activations_come_whole(ranks: int) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    assert run_distributed(exchanges, ranks, 300, timeout=120, backend="nccl") == [0] * ranks
