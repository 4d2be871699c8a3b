"""Fake quantization, and the choice of what is kept, as steps of autograd.

Values are those of DeepSpeed's ``deepspeed.compression.utils``, computed in fp32 whatever the dtype. Gradients go
straight through (arXiv:1308.3432): what is quantized, or chosen, has the gradient of its result.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "AsymQuantizer",
    "BinaryQuantizer",
    "SymQuantizer",
    "TernaryQuantizer",
    "TopKBinarizer",
    "count_kept",
    "kept_mask",
]


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None, None, None, None, None


def _rounded(x: Tensor, noise: Tensor | None) -> Tensor:
    """To the nearest; with ``noise`` in [0, 1) of the same shape, up with the probability of what is cut off."""
    return x.round() if noise is None else (x + noise).floor()


def _noise(noise: Tensor | None, like: Tensor) -> Tensor | None:
    return None if noise is None else noise.reshape(like.shape)


def _divisor(scale: Tensor) -> Tensor:
    """``scale``, and 1 for a stretch whose values are all the same."""
    return torch.where(scale > 0, scale, 1.0)


class SymQuantizer(_StraightThrough):
    """``SymQuantizer.apply(input, num_bits, min_value=None, max_value=None, num_groups=1, noise=None)``.

    Stretches of ``input`` (any shape, floating point, in row-major order) have a range each, from -max |x| to max |x|
    in ``2 ** num_bits`` steps; or all have the given one.

    Args:
        min_value, max_value: the range, of one element each, or neither.
        num_groups: of stretches; divides the number of elements.
        noise: ``[input's shape]`` in [0, 1), to round up or down by chance.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        num_bits: int,
        min_value: Tensor | None = None,
        max_value: Tensor | None = None,
        num_groups: int = 1,
        noise: Tensor | None = None,
    ) -> Tensor:
        steps = 2**num_bits
        x = input.float().reshape(num_groups, -1)
        if min_value is None or max_value is None:
            most = x.abs().amax(dim=-1, keepdim=True)
        else:
            most = torch.maximum(min_value.abs(), max_value).float().reshape(1, 1)
        scale = _divisor(2 * most / steps)
        levels = _rounded(x / scale, _noise(noise, x)).clamp(-steps // 2, steps // 2 - 1)
        return (levels * scale).reshape(input.shape).to(input.dtype)


class AsymQuantizer(_StraightThrough):
    """As ``SymQuantizer``, with ranges from the least to the largest value."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        num_bits: int,
        min_value: Tensor | None = None,
        max_value: Tensor | None = None,
        num_groups: int = 1,
        noise: Tensor | None = None,
    ) -> Tensor:
        steps = 2**num_bits
        x = input.float().reshape(num_groups, -1)
        if min_value is None or max_value is None:
            least, most = x.amin(dim=-1, keepdim=True), x.amax(dim=-1, keepdim=True)
        else:
            least, most = min_value.float().reshape(1, 1), max_value.float().reshape(1, 1)
        scale = (most - least) / steps
        same = scale <= 0
        scale = _divisor(scale)
        zero = torch.where(same, least, (least / scale).round() * scale)
        levels = _rounded((x - zero) / scale, _noise(noise, x)).clamp(0, steps - 1)
        return (levels * scale + zero).reshape(input.shape).to(input.dtype)


class TernaryQuantizer(_StraightThrough):
    """Three values a stretch, -a, 0 and a: zero is what lies below 0.7 of the mean magnitude, a the mean of the others
    (arXiv:1605.04711)."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        num_bits: int = 2,
        min_value: Tensor | None = None,
        max_value: Tensor | None = None,
        num_groups: int = 1,
        noise: Tensor | None = None,
    ) -> Tensor:
        x = input.float().reshape(num_groups, -1)
        size = x.abs()
        kept = size > 0.7 * size.mean(dim=1, keepdim=True)
        mean = (size * kept).sum(dim=1, keepdim=True) / kept.sum(dim=1, keepdim=True).clamp(min=1)
        return (mean * kept * x.sign()).reshape(input.shape).to(input.dtype)


class BinaryQuantizer(_StraightThrough):
    """Two values a stretch: the sign times the mean magnitude (arXiv:1603.05279)."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        num_bits: int = 1,
        min_value: Tensor | None = None,
        max_value: Tensor | None = None,
        num_groups: int = 1,
        noise: Tensor | None = None,
    ) -> Tensor:
        x = input.float().reshape(num_groups, -1)
        return (x.sign() * x.abs().mean(dim=1, keepdim=True)).reshape(input.shape).to(input.dtype)


# -- what is kept ------------------------------------------------------------------------------------------------------


def count_kept(ratio: float, total: int) -> int:
    """How many of ``total`` are kept: the ratio, rounded up as DeepSpeed does, but for what floating point adds."""
    return min(total, math.ceil(round(ratio * total, 6)))


def kept_mask(values: Tensor, count: int) -> Tensor:
    """The ``count`` largest of ``values`` (any shape): bool of that shape; of equals the earlier ones."""
    flat = values.detach().flatten()
    if count <= 0 or count >= flat.numel():
        return torch.full(values.shape, count > 0, dtype=torch.bool, device=values.device)
    least = flat.kthvalue(flat.numel() - count + 1).values  # a tenth of the time of a sort
    above, same = flat > least, flat == least
    return (above | (same & (same.cumsum(0) <= count - above.sum()))).view(values.shape)


class TopKBinarizer(torch.autograd.Function):
    """``TopKBinarizer.apply(scores, ratio, sigmoid)``: ones for that share of the largest scores, else zeros, in the
    scores' dtype and shape; the gradient goes straight through to all scores (arXiv:2005.07683).

    Args:
        sigmoid: ``ratio`` is a tensor of one element, whose sigmoid is the share.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, threshold: Any, sigmoid: bool = False) -> Tensor:
        ratio = float(torch.sigmoid(threshold)) if sigmoid else float(threshold)
        mask = kept_mask(inputs, count_kept(ratio, inputs.numel())).to(inputs.dtype)
        ctx.sigmoid = sigmoid
        if sigmoid:
            ctx.save_for_backward(mask)
            ctx.shape = threshold.shape
        return mask

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        if not ctx.sigmoid:
            return grad, None, None
        (mask,) = ctx.saved_tensors
        return grad, (grad * mask).sum().reshape(ctx.shape), None
