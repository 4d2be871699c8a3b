"""Reading packed codes, written from the format's description."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["opened", "unpacked"]


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Codes in int8 of int32 ``[rows, words]``, the first of a row in the lowest bits."""
    values = [(words.to(torch.int64) >> place) & (2**bits - 1) for place in range(0, 32, bits)]
    return (torch.stack(values, dim=-1).flatten(1) - 2 ** (bits - 1)).to(torch.int8)


def opened(weight: Tensor, bits: int, group_size: int) -> Tensor:
    """``weight`` as one reads it that was written in ``bits``."""
    groups = weight.unflatten(1, (-1, group_size))
    scale = (groups.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 0.5)).to(weight.dtype)
    codes = torch.round(groups.float() * (1 / scale.float())).clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return (codes.to(weight.dtype) * scale).flatten(1)
