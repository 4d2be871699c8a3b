"""Quantized values by their formulas, written out here, and by those that DeepSpeed 0.18.9 gave; gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ds_hf.compression.quantizers import (
    AsymQuantizer,
    BinaryQuantizer,
    SymQuantizer,
    TernaryQuantizer,
    TopKBinarizer,
    count_kept,
    kept_mask,
)


def weight(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


X = torch.tensor([[-1.0, -0.3, 0.05, 0.7], [2.0, 0.5, 0.0, -0.1]])


@pytest.mark.parametrize(
    ("quantizer", "bits", "groups", "expected"),
    [  # what DeepSpeed 0.18.9 gives for X
        (SymQuantizer, 4, 1, [[-1.0, -0.25, 0.0, 0.75], [1.75, 0.5, 0.0, 0.0]]),
        (SymQuantizer, 3, 2, [[-1.0, -0.25, 0.0, 0.75], [1.5, 0.5, 0.0, 0.0]]),
        (AsymQuantizer, 4, 1, [[-0.9375, -0.375, 0.0, 0.75], [1.875, 0.5625, 0.0, -0.1875]]),
        (TernaryQuantizer, 2, 1, [[-1.05, 0.0, 0.0, 1.05], [1.05, 1.05, 0.0, 0.0]]),
        (BinaryQuantizer, 1, 2, [[-0.5125, -0.5125, 0.5125, 0.5125], [0.65, 0.65, 0.0, -0.65]]),
    ],
)
def test_values(quantizer: Any, bits: int, groups: int, expected: list[list[float]]) -> None:
    torch.testing.assert_close(quantizer.apply(X, bits, None, None, groups), torch.tensor(expected))


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("quantizer", [SymQuantizer, AsymQuantizer])
@pytest.mark.parametrize("groups", [1, 12, 48])
def test_a_stretch_has_as_many_values_as_its_bits_say_and_errs_by_half_a_step(
    quantizer: Any, bits: int, groups: int
) -> None:
    x = weight(48, 64)
    quantized = quantizer.apply(x, bits, None, None, groups).view(groups, -1)
    assert all(row.unique().numel() <= 2**bits for row in quantized)
    rows = x.view(groups, -1)
    span = (2 * rows.abs().amax(dim=1) if quantizer is SymQuantizer else rows.amax(dim=1) - rows.amin(dim=1)) / 2**bits
    # The largest value is one step beyond the last level.
    assert ((quantized - rows).abs().amax(dim=1) <= span * 1.5001).all()
    assert ((quantized - rows).abs().quantile(0.9, dim=1) <= span * 0.5001).all()


@pytest.mark.parametrize("quantizer", [SymQuantizer, AsymQuantizer, TernaryQuantizer, BinaryQuantizer])
def test_gradients_go_straight_through(quantizer: Any) -> None:
    x = weight(8, 16).requires_grad_()
    bits = {TernaryQuantizer: 2, BinaryQuantizer: 1}.get(quantizer, 4)
    target = weight(16, 8).t()
    (quantizer.apply(x, bits, None, None, 8) * target).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, target)


@pytest.mark.parametrize("quantizer", [SymQuantizer, AsymQuantizer, TernaryQuantizer, BinaryQuantizer])
@pytest.mark.parametrize("value", [0.0, 0.75])
def test_equal_values_stay_numbers(quantizer: Any, value: float) -> None:
    bits = {TernaryQuantizer: 2, BinaryQuantizer: 1}.get(quantizer, 8)
    quantized = quantizer.apply(torch.full((4, 4), value), bits, None, None, 2)
    torch.testing.assert_close(quantized, torch.full((4, 4), value), rtol=0, atol=2 / 256)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_computed_in_thirty_two(dtype: torch.dtype) -> None:
    x = weight(16, 16).to(dtype)
    expected = SymQuantizer.apply(x.float(), 4, None, None, 4).to(dtype)
    assert torch.equal(SymQuantizer.apply(x, 4, None, None, 4), expected)


def test_rounding_by_chance_is_right_on_average() -> None:
    x, generator = weight(4, 8), torch.Generator().manual_seed(3)
    draws = [SymQuantizer.apply(x, 3, None, None, 4, torch.rand(4, 8, generator=generator)) for _ in range(3000)]
    step = 2 * x.abs().amax(dim=1, keepdim=True) / 8
    inside = x < step * 3  # above the last level there is nothing to round up to
    assert ((torch.stack(draws).mean(dim=0) - x).abs() < 0.05 * step)[inside].all()
    assert (torch.stack(draws).std(dim=0) > 0).any()


def test_a_given_range_is_taken() -> None:
    low, high = torch.tensor(-2.0), torch.tensor(1.0)
    assert SymQuantizer.apply(X, 2, low, high, 1).unique().tolist() == [-1.0, 0.0, 1.0]
    assert AsymQuantizer.apply(X, 2, low, high, 1).min().item() == -1.5 + 0.75


@pytest.mark.parametrize(
    ("ratio", "total", "kept"), [(0.5, 7, 4), (0.1, 30, 3), (0.7, 10, 7), (1.0, 5, 5), (0.3, 10, 3)]
)
def test_what_is_kept_is_rounded_up_but_not_for_floating_point(ratio: float, total: int, kept: int) -> None:
    assert count_kept(ratio, total) == kept


def test_of_equals_the_earlier_are_kept() -> None:
    assert kept_mask(torch.tensor([[1.0, 2.0], [1.0, 1.0]]), 2).tolist() == [[True, True], [False, False]]


@pytest.mark.parametrize("count", [0, 1, 17, 60, 64])
def test_the_largest_are_kept_as_a_stable_sort_orders_them(count: int) -> None:
    values = weight(8, 8).mul(3).round()  # with many equals
    order = values.flatten().sort(descending=True, stable=True).indices[:count]
    expected = torch.zeros(64, dtype=torch.bool).index_fill(0, order, True).view(8, 8)
    assert torch.equal(kept_mask(values, count), expected)


def test_scores_have_the_gradient_of_their_mask() -> None:
    scores = weight(4, 4).requires_grad_()
    mask = TopKBinarizer.apply(scores, 0.25, False)
    assert mask.sum() == 4
    assert scores.detach()[mask.bool()].min() > scores.detach()[~mask.bool()].max()
    (mask * X.repeat(2, 1)).sum().backward()
    assert scores.grad is not None
    assert torch.equal(scores.grad, X.repeat(2, 1))


def test_a_share_that_is_learned_has_a_gradient() -> None:
    scores, share = weight(4, 4).requires_grad_(), torch.zeros(1, requires_grad=True)
    mask = TopKBinarizer.apply(scores, share, True)
    assert mask.sum() == 8  # half of them
    mask.sum().backward()
    assert share.grad is not None
    assert share.grad.item() == 8
