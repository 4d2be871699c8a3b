"""Split masters: fp32 as a bf16 tensor, which is the value rounded to nearest, and the 16 bits that are missing to it.

The low bits are the lower 16, taken as a signed number, and the high half the upper ones, one more where that
number is negative: that is rounding to nearest, ties away from zero. The value is their sum, so every number comes back
bit for bit, and a NaN as some NaN. ``csrc/cuda/core.cuh`` has the same arithmetic.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["LOW", "join", "split_fp32", "write_split"]

LOW = torch.int16  # the dtype of the low bits; no other tensor of the engine has it
_PIECE = 1 << 24  # elements that are split at once: what is in between takes six times as much memory as the values


def split_fp32(values: Tensor) -> tuple[Tensor, Tensor]:
    """The high half, bf16, and the low one, int16, of ``values``, fp32 of any shape, in that shape."""
    words, unknown = values.contiguous().view(torch.int32), values.isnan()
    high = ((words + 0x8000) >> 16).to(LOW).view(torch.bfloat16)
    low = (words << 16 >> 16).to(LOW)
    return high.masked_fill(unknown, torch.nan), low.masked_fill(unknown, 0)


def write_split(values: Tensor, high: Tensor, low: Tensor | None = None) -> None:
    """``split_fp32`` into tensors that are there, all flat; ``values`` of any floating dtype."""
    for start in range(0, values.numel(), _PIECE):
        piece = slice(start, start + _PIECE)
        upper, lower = split_fp32(values[piece].to(device=high.device, dtype=torch.float32))
        high[piece].copy_(upper)
        if low is not None:
            low[piece].copy_(lower)


def join(high: Tensor, low: Tensor) -> Tensor:
    """The fp32 values of two halves of one shape."""
    return (high.view(LOW).to(torch.int32) << 16).add_(low).view(torch.float32)
