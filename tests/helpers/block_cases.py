"""Cases that the CPU's and the GPU's block formats go through, against ``reference_blocks``."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ds_hf.engine.ops import reference_blocks
from ds_hf.engine.ops.blocks import BlockFormat

FORMATS = [
    BlockFormat(8),
    BlockFormat(4),
    BlockFormat(1, 4096),
    BlockFormat(8, 64),
    BlockFormat(4, 512),
    BlockFormat(1),
    BlockFormat(1, 2048),
]
SIZES = (1, 7, 64, 255, 256, 257, 1003, 4096, 2 * 4096 + 5)


def values_of(rows: int, numel: int, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> Tensor:
    """Blocks of quite different sizes, a zero and a block of zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10.0 ** torch.randint(-3, 3, (rows, -(-numel // 100)), generator=generator)
    values = torch.randn(rows, numel, generator=generator) * sizes.repeat_interleave(100, 1)[:, :numel]
    values[:, :: max(numel // 3, 1)] = 0
    if numel > 256:
        values[0, :256] = 0
    return values.to(dtype).to(device)


def check_format(
    ops: Any,
    form: BlockFormat,
    rows: int,
    numel: int,
    dtype: torch.dtype,
    feedback: torch.dtype | None,
    device: str = "cpu",
    beta: float = 0.0,
) -> None:
    """Numbers, scales and feedback are the reference's; what is read from them too."""
    numbers = {"bits": form.bits, "block": form.numel}
    values = values_of(rows, numel, dtype, device)
    kept = None if feedback is None else values_of(rows, numel, feedback, device, seed=1)
    wanted_kept = None if kept is None else kept.clone()
    got, wanted = (torch.zeros_like(form.empty(rows, numel, values.device)) for _ in range(2))
    ops.to_blocks_(got, values, kept, **numbers, gain=0.5, beta=beta)
    reference_blocks.to_blocks_(wanted, values, wanted_kept, **numbers, gain=0.5, beta=beta)
    count = -(-numel // form.numel)
    assert torch.equal(got[:, : -4 * count], wanted[:, : -4 * count])
    scales, wanted_scales = (t[:, -4 * count :].clone().view(torch.float32) for t in (got, wanted))
    tolerance = 1e-6 if form.bits == 1 else 0.0  # a mean over a block is added up in another order
    torch.testing.assert_close(scales, wanted_scales, rtol=tolerance, atol=0)
    if kept is not None and wanted_kept is not None:
        scale = max(float(values.abs().max()), float(wanted_kept.abs().max()))
        exact = beta == 0 and form.bits != 1
        rounded = 0.0 if exact else 1e-6 * scale if feedback is torch.float32 else 2**-7 * scale
        torch.testing.assert_close(kept, wanted_kept, rtol=0 if exact else 2**-7, atol=rounded)
    check_reading(ops, form, wanted, rows, numel, dtype)


def check_reading(ops: Any, form: BlockFormat, blocks: Tensor, rows: int, numel: int, dtype: torch.dtype) -> None:
    """Each row by itself, and all rows added up, to nothing and to what was there."""
    numbers = {"bits": form.bits, "block": form.numel}
    for into in {1, rows}:
        for out_dtype in (torch.float32, dtype):
            for added in (False, True):
                before = torch.ones(into, numel, dtype=dtype, device=blocks.device) if added else None
                got, wanted = (torch.full((into, numel), math.nan, dtype=out_dtype).to(blocks.device) for _ in range(2))
                ops.from_blocks_(got, blocks, before, **numbers, factor=0.25)
                reference_blocks.from_blocks_(wanted, blocks, before, **numbers, factor=0.25)
                torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def check_not_finite(ops: Any, form: BlockFormat, device: str = "cpu") -> None:
    """A block with an infinity or a nan is nan as a whole, its feedback stays; its neighbours know nothing of it."""
    for bad in (math.inf, -math.inf, math.nan):
        values = values_of(1, 3 * form.numel, torch.float32, device, seed=2)
        values[0, form.numel + 5] = bad
        kept = torch.full_like(values, 0.5)
        blocks = form.empty(1, values.numel(), values.device)
        ops.to_blocks_(blocks, values, kept, bits=form.bits, block=form.numel)
        out = torch.empty_like(values)
        ops.from_blocks_(out, blocks, None, bits=form.bits, block=form.numel)
        inside = slice(form.numel, 2 * form.numel)
        assert out[0, inside].isnan().all()
        assert (kept[0, inside] == 0.5).all()
        assert out[0, : form.numel].isfinite().all()
        assert out[0, 2 * form.numel :].isfinite().all()
        assert kept.isfinite().all()


def check_extremes(ops: Any, form: BlockFormat, device: str = "cpu") -> None:
    """The largest and the smallest numbers that fp32 has make neither infinities nor nans where 8 and 4 bits hold
    them."""
    for value in (3e38, 1e-30, 1e-38, 1e-45, 0.0):
        if form.bits == 1 and value == 3e38:
            continue  # its square is no fp32
        values = torch.full((1, form.numel), value, device=device)
        values[0, ::2] *= -1
        blocks = form.write(values)
        out = torch.empty_like(values)
        ops.to_blocks_(blocks, values, None, bits=form.bits, block=form.numel)
        ops.from_blocks_(out, blocks, None, bits=form.bits, block=form.numel)
        assert out.isfinite().all()
        assert (out - values).abs().max() <= max(value * 1e-6, 1e-29)
