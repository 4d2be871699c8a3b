"""Columns of matrices of which shards hold parts: any division has the sums, the choice and the elements of one."""

from __future__ import annotations

import pytest
import torch

from ds_hf.engine.optim.zenflow.columns import Columns
from ds_hf.engine.zero.layout import FlatLayout

SHAPES = [torch.Size(shape) for shape in ((5, 7), (3,), (4, 2, 3), (1, 6), (), (9, 1), (2, 40))]
MATRICES = [0, 2, 3, 5, 6]


def values(layout: FlatLayout) -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    full = torch.zeros(layout.numel)
    parts = layout.views(full)
    for part in parts:
        part.copy_(torch.randn(part.shape, generator=generator))
    return full, parts


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_sums_and_positions_are_those_of_the_whole(world: int) -> None:
    layout = FlatLayout(SHAPES, world, alignment=4)
    full, parts = values(layout)
    sums = torch.cat([parts[index].flatten(1).abs().sum(0) for index in MATRICES])
    ranks = [Columns(layout, list(layout.fragments(rank))) for rank in range(world)]
    shards = [full[slice(*layout.shard_range(rank))] for rank in range(world)]
    found = torch.stack([columns.sums(shard) for columns, shard in zip(ranks, shards, strict=True)]).sum(0)
    torch.testing.assert_close(found, sums)

    chosen = ranks[0].largest(sums, 0.3)
    assert [int(part.sum()) for part in torch.split(chosen, ranks[0].counts)] == [2, 1, 1, 1, 12]
    expected = torch.zeros(layout.numel)
    views = layout.views(expected)
    for index, view in enumerate(views):
        if index not in MATRICES:
            view.fill_(1)
    for index, part in zip(MATRICES, torch.split(chosen, ranks[0].counts), strict=True):
        views[index].copy_(part.float().view(views[index].shape[1:]).expand(views[index].shape))
    for rank, columns in enumerate(ranks):
        mine = torch.zeros(layout.shard_numel)
        positions = columns.positions(chosen)
        mine[positions] = 1
        assert torch.equal(mine, expected[slice(*layout.shard_range(rank))])
        assert torch.equal(positions, positions.sort().values)
        assert positions.dtype is torch.int32


def test_the_largest_are_chosen_of_each_matrix() -> None:
    layout = FlatLayout([torch.Size((2, 4)), torch.Size((2, 10))], 1)
    columns = Columns(layout, list(layout.fragments(0)))
    sums = torch.tensor([1.0, 4.0, 2.0, 3.0, *range(10)])
    assert columns.largest(sums, 0.5).nonzero().flatten().tolist() == [1, 3, 9, 10, 11, 12, 13]
    assert columns.largest(sums, 0.01).nonzero().flatten().tolist() == [1, 13]
