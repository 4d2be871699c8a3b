"""Gradients summed by copies are taken from where backward left them, and copied together only where more comes."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from ds_hf.engine.comm import peers
from ds_hf.engine.comm.mesh import data_parallel_axis
from ds_hf.engine.comm.peer_sums import PeerSums
from ds_hf.engine.zero.buffer import FlatBuffer
from ds_hf.engine.zero.gradients import GradientBuffer, GradientPolicy
from tests.engine.comm.test_peers import peers_in_files
from tests.helpers.distributed import run_distributed

SHAPES = [(5, 7), (3,), (4, 4)]


CASES = [
    ([[0, 1, 2]], [True]),
    ([[0, 2]], [False]),  # one has none: zeros are sent for it
    ([[0, 1, 2], [1]], [True, False]),  # a reentrant checkpoint added to what was taken
    ([[0], [1, 2]], [False, False]),
]


def check_all(folder: str) -> None:
    peers.LEAST_COPIED_NBYTES = 0
    sums = peers_in_files(data_parallel_axis(), folder).sums()
    for times, taken in CASES:
        for second in (False, True):
            assert reduced(sums, times, second) == taken * (1 + second), (times, second)


def reduced(sums: PeerSums, times: list[list[int]], second: bool) -> list[bool]:
    """Give the parameters of ``times`` gradients, one collection each; whether each was taken as it was."""
    axis = data_parallel_axis()
    params = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    buffer = FlatBuffer(params, axis, dtype=torch.bfloat16, device=torch.device("cpu"), sharded=True)
    buffer.adopt()
    policy = GradientPolicy(False, True, 0.5, 1.0, None, torch.float32)
    gradient = GradientBuffer(buffer, policy, sums=sums)
    expected, taken = torch.zeros(buffer.layout.numel), []
    buffer.gather()
    for micro in range(1 + second):
        for number, indices in enumerate(times):
            for rank in range(2):
                for index in indices:
                    slot = buffer.layout.slots[index]
                    value = torch.full(slot.shape, float(1 + index + 8 * rank + 2 * number + micro))
                    expected[slot.offset : slot.end] += value.flatten() / 2
                    if rank == axis.rank:
                        params[index].grad = value.to(torch.bfloat16)
                        gradient.ready.add(index)
            gradient.collect(soon=True)
            assert all(param.grad is None for param in params)
            taken.append(bool(gradient._taken))
            assert gradient.has_partial
        gradient.reduce()
        assert not gradient.has_partial
    owned = gradient.settled()
    assert owned is not None
    assert owned.dtype is (torch.float32 if second else torch.bfloat16)
    low, high = buffer.layout.shard_range(axis.rank)
    assert torch.equal(owned.float(), expected[low:high])
    return taken


def test_sums_of_what_was_taken(tmp_path: Path) -> None:
    run_distributed(check_all, 2, str(tmp_path))
