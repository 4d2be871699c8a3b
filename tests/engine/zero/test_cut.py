"""Cuts: local shapes, the way into the whole and back, Megatron's strides, ranges that cannot be."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ds_hf.checkpoint.cuts import Cut, tiles
from ds_hf.engine.zero.cut import cut_of, even_cut, set_cut, whole_shape


@pytest.mark.parametrize(
    ("cut", "shape"),
    [
        (Cut(0, ((2, 2),), torch.Size([6, 4])), (2, 4)),
        (Cut(1, ((3, 1),), torch.Size([6, 4])), (6, 1)),
        (Cut(0, ((0, 2), (4, 1)), torch.Size([6, 4])), (3, 4)),
        (Cut(1, ((4, 2), (0, 3)), torch.Size([2, 6, 3])), (2, 5, 3)),  # in the order of the local tensor
    ],
)
def test_what_is_taken_is_put_back(cut: Cut, shape: tuple[int, ...]) -> None:
    whole = torch.arange(float(cut.whole.numel())).view(cut.whole)
    local = cut.take(whole)
    assert local.shape == cut.shape == shape
    indices = [index for first, count in cut.ranges for index in range(first, first + count)]
    assert torch.equal(local, whole.index_select(cut.dim, torch.tensor(indices)))
    back = torch.full_like(whole, -1.0)
    cut.put(back, local)
    assert torch.equal(cut.take(back), local)
    assert int((back >= 0).sum()) == local.numel()  # and nothing else was written


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_even_cuts_are_megatrons(stride: int, dim: int) -> None:
    """Megatron-LM splits the whole into size x stride pieces, of which rank r holds r, r + size, ..."""
    whole, size = torch.randn(24, 48), 4
    pieces = whole.split(whole.shape[dim] // (size * stride), dim)
    found = []
    for rank in range(size):
        local = torch.cat(pieces[rank::size], dim)
        cut = even_cut(local.shape, dim, rank, size, stride)
        assert cut.whole == whole.shape
        assert torch.equal(cut.take(whole), local)
        found += cut.ranges
    assert tiles(found, whole.shape[dim])


@pytest.mark.parametrize(
    ("ranges", "told"),
    [
        ((), "not separate ranges"),
        (((0, 0),), "not separate ranges"),
        (((0, 3), (2, 2)), "not separate ranges"),
        (((4, 3),), "of the 6 indices of dimension 0"),
        (((-1, 2),), "not separate ranges"),
    ],
)
def test_ranges_that_cannot_be(ranges: tuple[tuple[int, int], ...], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Cut(0, ranges, torch.Size([6, 4]))


def test_dimensions_and_strides_that_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"dimension 2 is cut.*\(6, 4\)"):
        Cut(2, ((0, 1),), torch.Size([6, 4]))
    with pytest.raises(ValueError, match=r"partition_dim is 1, and the parameter has shape \(3,\)"):
        even_cut([3], 1, 0, 2)
    with pytest.raises(ValueError, match="partition_stride is 2, which does not divide the 3 indices"):
        even_cut([3, 4], 0, 0, 2, stride=2)
    with pytest.raises(ValueError, match="empty"):
        even_cut([0, 4], 0, 0, 2)


def test_ranges_tile_once() -> None:
    assert tiles([(3, 2), (0, 3)], 5)
    assert not tiles([(3, 2), (0, 2)], 5)  # a gap
    assert tiles([(3, 2), (0, 2)], 5, partly=True)
    assert not tiles([(2, 2), (0, 3)], 5, partly=True)  # twice
    assert not tiles([(0, 6)], 5, partly=True)


def test_a_parameter_without_a_cut_is_whole() -> None:
    param = nn.Parameter(torch.zeros(2, 4))
    assert cut_of(param) is None
    assert whole_shape(param, param.shape) == (2, 4)
    set_cut(param, even_cut(param.shape, 0, 1, 3))
    assert cut_of(param) == Cut(0, ((2, 2),), torch.Size([6, 4]))
    assert whole_shape(param, param.shape) == (6, 4)
