"""Gathers and sums in blocks on gloo processes, against what each process computes of all others' data by itself."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_hf.config.types.root import MeshShape
from ds_hf.engine.comm.block_collectives import BlockSums, Feedback, all_gather_blocks, spread_blocks
from ds_hf.engine.comm.mesh import Axis, Mesh
from ds_hf.engine.ops.blocks import BlockFormat
from tests.helpers.distributed import run_distributed

SIZES = (1, 63, 257, 5000)
FORMATS = (BlockFormat(8), BlockFormat(4, 64))


def data(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 + rank)).to(dtype)


def kept(form: BlockFormat, rows: Tensor) -> Tensor:
    return form.read(form.write(rows), torch.empty(rows.shape))


def wanted_sum(form: BlockFormat, everyone: list[Tensor], place: int, near: int) -> Tensor:
    """This rank's shard of the mean, rounded once for each hop."""
    ranks = len(everyone)
    rows = [kept(form, each.float().view(ranks, -1)) for each in everyone]
    mine = [row[place] for row in rows]
    if near == 1:
        return sum(mine[1:], start=mine[0]) / ranks
    hosts = [torch.stack(mine[first : first + near]) for first in range(0, ranks, near)]
    again = [kept(form, sum(host[1:], start=host[0])[None])[0] for host in hosts]
    return sum(again[1:], start=again[0]) / ranks


def check_all(near: int) -> list[Any]:
    mesh = Mesh(MeshShape(data=dist.get_world_size()))
    axis = mesh.replicas
    groups = mesh.neighbours(near) if near > 1 else None
    sent: list[int] = []
    original = dist.all_to_all_single

    def counted(output: Tensor, given: Tensor, *args: Any, **kwargs: Any) -> Any:
        group = kwargs["group"]
        sent.append(given.nbytes * (dist.get_world_size(group) - 1) // dist.get_world_size(group))
        return original(output, given, *args, **kwargs)

    found = []
    for form in FORMATS:
        for n in SIZES:
            everyone = [data(rank, n * axis.world_size) for rank in range(axis.world_size)]
            with patch.object(dist, "all_to_all_single", counted):
                sums = BlockSums(axis, form, groups)
                got = sums.reduce_scatter(everyone[axis.rank].clone(), factor=1 / axis.world_size)
            torch.testing.assert_close(got, wanted_sum(form, everyone, axis.rank, near), rtol=1e-6, atol=1e-6)
            found.append((form.nbytes(n), sent.copy()))
            sent.clear()
            check_gather(axis, form, n)
        check_not_finite(axis, form, groups)
        check_nothing(axis, form, groups)
    return found


def check_gather(axis: Axis, form: BlockFormat, n: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        everyone = [data(rank, n, dtype) for rank in range(axis.world_size)]
        full = torch.empty(n * axis.world_size, dtype=dtype)
        all_gather_blocks(full, everyone[axis.rank], axis, form)
        wanted = torch.cat([kept(form, each[None])[0] for each in everyone])
        torch.testing.assert_close(full, wanted.to(dtype), rtol=0, atol=0)


def check_not_finite(axis: Axis, form: BlockFormat, groups: tuple[Axis, Axis] | None) -> None:
    """An infinity of one rank is not finite for the rank that owns its place, and for no other."""
    n = 300
    for bad in (math.inf, math.nan):
        full = data(axis.rank, n * axis.world_size)
        if axis.rank == 0:
            full[-1] = bad  # of the last rank
        got = BlockSums(axis, form, groups).reduce_scatter(full, factor=1.0)
        assert got.isfinite().all() == (axis.rank < axis.world_size - 1)


def check_nothing(axis: Axis, form: BlockFormat, groups: tuple[Axis, Axis] | None) -> None:
    """A sum is of negative zeros where no rank has anything, and what rounding has lost before is owed still; one rank
    with zeros is enough for another sum."""
    n = 300
    for feedback in (None, Feedback(0.5, 9)):
        sums = BlockSums(axis, form, groups, feedback)
        full = data(axis.rank, n * axis.world_size)
        first = sums.reduce_scatter(full.clone(), factor=1.0)
        owed = {hop: error.clone() for hop, error in sums._errors.items()}
        for others in (True, False):  # whether the last rank has nothing, as all others
            nothing = others or axis.rank < axis.world_size - 1
            zeros = torch.full_like(full, -0.0 if nothing else 0.0)
            got = sums.reduce_scatter(zeros, factor=1.0, nothing=nothing)
            if others:
                assert (got.signbit() & (got == 0)).all()
                assert all(torch.equal(error, owed[hop]) for hop, error in sums._errors.items())
            else:
                assert not (got.signbit() & (got == 0)).all()
        assert first.abs().sum() > 0


@pytest.mark.parametrize(("world", "near"), [(2, 1), (4, 2), pytest.param(3, 1, marks=pytest.mark.slow)])
def test_numbers_and_bytes(world: int, near: int) -> None:
    for found in run_distributed(check_all, world, near):
        for row, sent in found:
            hops = [(world // near - 1) * row, row * near * (near - 1)] if near > 1 else [row * (world - 1)]
            # two hops: a row for each host and other neighbour, then one for each other host
            expected = [row * (world // near) * (near - 1), row * (world // near - 1)] if near > 1 else hops
            assert sent == expected


def with_feedback(reset: int) -> tuple[float, float, int]:
    mesh = Mesh(MeshShape(data=dist.get_world_size()))
    axis, form = mesh.replicas, BlockFormat(4)
    exact = sum(data(rank, 2000 * axis.world_size) for rank in range(axis.world_size))
    assert isinstance(exact, Tensor)
    mine = exact.view(axis.world_size, -1)[axis.rank]
    errors = []
    for feedback in (None, Feedback(0.5, reset)):
        sums = BlockSums(axis, form, None, feedback)
        total = torch.zeros_like(mine)
        for _ in range(40):
            total += sums.reduce_scatter(data(axis.rank, exact.numel()), factor=1.0)
        errors.append(float((total / 40 - mine).norm() / mine.norm()))
    return errors[0], errors[1], sums.nbytes


def test_feedback_makes_up_for_what_is_lost() -> None:
    for plain, corrected, nbytes in run_distributed(with_feedback, 2, 1024):
        assert corrected < 0.3 * plain
        assert nbytes == 2 * 2 * 2000
    for plain, corrected, _ in run_distributed(with_feedback, 2, 1):  # forgotten each time
        assert corrected == pytest.approx(plain)


def spread() -> None:
    mesh = Mesh(MeshShape(data=4))
    inner, _ = mesh.neighbours(2)
    form, n = BlockFormat(8), 300
    second = torch.empty(2 * n)
    spread_blocks(second, data(mesh.replicas.rank, n), mesh.replicas, inner, form)
    first = 2 * inner.rank
    wanted = torch.cat([kept(form, data(rank, n)[None])[0] for rank in (first, first + 1)])
    assert torch.equal(second, wanted)


def test_second_shards_are_filled_in_blocks() -> None:
    run_distributed(spread, 4)
