"""What the block formats are, in plain torch: the CPU's and the GPU's forms are held against this.

A row of ``numel`` values becomes a row of bytes: the numbers, of 8, 4 or 1 bit, padded to a multiple of 4 bytes, and
behind them an fp32 scale for each block. So one collective carries both.

==== ================================== ============================== =========================================
bits number                             scale of a block               bytes
==== ================================== ============================== =========================================
8    ``round(x / scale)``, -127 to 127  largest magnitude / 127        one a number
4    ``round(x / scale)``, -7 to 7      largest magnitude / 7          two numbers, the first in the lower half
1    whether ``x >= 0``                 root of the mean square        eight numbers, the first in the lowest bit
==== ================================== ============================== =========================================

Halves are rounded to even. A block that holds an infinity or a nan has the scale nan: all of its values come out as
nan, where the overflow flag sees them, and feedback keeps what it had. A block smaller than 1e-30 is zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["LEAST", "from_blocks_", "packed_numbers", "to_blocks_", "unpacked_numbers"]

LEAST = 1e-30  # smaller magnitudes have inverses that fp32 does not hold


def to_blocks_(
    out: Tensor, values: Tensor, feedback: Tensor | None, *, bits: int, block: int, gain: float = 1.0, beta: float = 0.0
) -> None:
    """Write ``values + gain * feedback`` in blocks, and into ``feedback`` what that has lost:
    ``beta * gain * feedback + (1 - beta) * lost``.

    Args:
        out: uint8 ``[rows, nbytes of a row]``.
        values: ``[rows, numel]``.
        feedback: the same shape, fp32 or 16 bits, or ``None``.
        beta: 0 for error feedback (1-bit Adam, arXiv:2102.02888), else the average of LoCo (arXiv:2407.04480).
    """
    rows, numel = values.shape
    before = None if feedback is None else feedback.float() * gain
    exact = values.float() if before is None else values.float() + before
    blocks = torch.nn.functional.pad(exact, (0, -numel % block)).view(rows, -1, block)
    if bits == 1:
        counts = torch.full((blocks.shape[1],), block, device=out.device)
        counts[-1:] -= -numel % block
        scale = (blocks.square().sum(-1) / counts).sqrt()
        finite = scale.isfinite()
        scale = torch.where(scale >= LEAST, scale, 0.0)
        numbers = (blocks >= 0).to(torch.uint8)
        kept = torch.where(blocks >= 0, scale[..., None], -scale[..., None])
    else:
        largest = blocks.abs().amax(-1)
        limit = torch.full_like(largest, 2 ** (bits - 1) - 1)  # torch divides otherwise where one side is a number
        finite = largest.isfinite()
        zero = ~finite | (largest < LEAST)
        scale = torch.where(zero, 0.0, largest / limit)
        whole = (torch.where(zero[..., None], 0.0, blocks) * torch.where(zero, 0.0, limit / largest)[..., None]).round()
        numbers = whole.to(torch.int8).view(torch.uint8)
        kept = whole * scale[..., None]
    packed = packed_numbers(numbers.view(rows, -1)[:, :numel], bits)
    out[:, : packed.shape[1]] = packed
    scales = torch.where(finite, scale, torch.nan).contiguous()
    out[:, out.shape[1] - 4 * scales.shape[1] :] = scales.view(torch.uint8)
    if feedback is None or before is None:
        return
    lost = exact - kept.view(rows, -1)[:, :numel]
    if beta:
        lost = before * beta + lost * (1 - beta)
    known = finite[..., None].expand(blocks.shape).reshape(rows, -1)[:, :numel]
    feedback.copy_(torch.where(known, lost.to(feedback.dtype), feedback))


def from_blocks_(
    out: Tensor, blocks: Tensor, before: Tensor | None, *, bits: int, block: int, factor: float = 1.0
) -> None:
    """``out = factor * sum + before``, where a row of ``out`` is the sum of one or more rows of blocks, in their order.

    Args:
        out: ``[rows, numel]``, fp32 or 16 bits.
        blocks: uint8 ``[rows * summed, nbytes of a row]``.
        before: shape of ``out``, which it may be; ``None`` for zeros.
    """
    rows, numel = out.shape
    count = -(-numel // block)
    numbers = unpacked_numbers(blocks[:, : -(-numel * bits // 8)], bits)[:, :numel].float()
    scales = blocks[:, blocks.shape[1] - 4 * count :].clone().view(torch.float32).repeat_interleave(block, -1)
    parts = (numbers * scales[:, :numel]).view(rows, -1, numel)
    total = torch.zeros(rows, numel, dtype=torch.float32, device=out.device)
    for part in parts.unbind(1):
        total = total + part
    total = total * factor
    out.copy_(total if before is None else total + before.float())


def packed_numbers(numbers: Tensor, bits: int) -> Tensor:
    """``[rows, bytes]`` of uint8 ``[rows, numel]``; what is missing in the last byte is as of zeros."""
    if bits == 8:
        return numbers
    each = 8 // bits
    padding = -numbers.shape[1] % each
    numbers = torch.nn.functional.pad(numbers, (0, padding), value=1 if bits == 1 else 0)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=numbers.device)
    split = (numbers & (2**bits - 1)).view(len(numbers), -1, each)
    packed: Tensor = (split << shifts).sum(-1, dtype=torch.uint8)
    return packed


def unpacked_numbers(packed: Tensor, bits: int) -> Tensor:
    """``[rows, numbers]`` of what ``packed_numbers`` gave: int8, for 1 bit 1 and -1."""
    if bits == 8:
        return packed.contiguous().view(torch.int8)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    split = ((packed[..., None] >> shifts) & (2**bits - 1)).to(torch.int8).flatten(1)
    numbers: Tensor = 2 * split - 1 if bits == 1 else (split ^ 8) - 8
    return numbers
