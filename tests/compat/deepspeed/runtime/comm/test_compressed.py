"""``compressed_allreduce`` as DeepSpeed's own test of it says: signs, scales of whole tensors, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.comm.mpi import MpiBackend
from deepspeed.runtime.comm.nccl import NcclBackend
from torch import Tensor

from tests.helpers.distributed import run_distributed

NUMEL, PADDED = 100, 128  # of two processes


def rounded(values: Tensor) -> tuple[Tensor, Tensor]:
    kept = values.norm() / values.numel() ** 0.5 * torch.where(values >= 0, 1.0, -1.0)
    return kept, values - kept


def data(rank: int, step: int) -> Tensor:
    return torch.randn(4, 25, generator=torch.Generator().manual_seed(10 * step + rank))


def exchanged() -> list[tuple[Tensor, Tensor, Tensor]]:
    backend = NcclBackend()
    worker, server = torch.zeros(PADDED), torch.zeros(PADDED // 2)
    found = []
    for step in range(3):
        buffer = data(dist.get_rank(), step)
        result = backend.compressed_allreduce(buffer, worker, server, 0)
        assert torch.equal(buffer, result)
        found.append((result.clone(), worker.clone(), server.clone()))
    with pytest.raises(ValueError, match="must be 2 x 8 x n"):
        backend.compressed_allreduce(data(0, 0), torch.zeros(NUMEL), server)
    assert MpiBackend(cuda_aware=False).size == 2
    return found


def test_compressed_allreduce() -> None:
    ranks = run_distributed(exchanged, 2)
    workers, servers = [torch.zeros(PADDED)] * 2, [torch.zeros(PADDED // 2)] * 2
    for step in range(3):
        padded = [torch.nn.functional.pad(data(rank, step).view(-1), (0, PADDED - NUMEL)) for rank in range(2)]
        kept: list[Any] = [rounded(values + error) for values, error in zip(padded, workers, strict=True)]
        workers = [error for _, error in kept]
        mean = ((kept[0][0] + kept[1][0]) / 2).view(2, -1)
        again = [rounded(part + error) for part, error in zip(mean, servers, strict=True)]
        servers = [error for _, error in again]
        wanted = torch.cat([part for part, _ in again])[:NUMEL].view(4, 25)
        for rank in range(2):
            result, worker, server = ranks[rank][step]
            torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(worker, workers[rank], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(server, servers[rank], rtol=1e-5, atol=1e-5)
