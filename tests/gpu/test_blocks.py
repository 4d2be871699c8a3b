"""The block formats on a GPU, against the reference; tests/engine/ops/test_blocks.py has what they are."""

from __future__ import annotations

import pytest
import torch

from ds_hf.engine.ops import blocks, cuda_blocks
from ds_hf.engine.ops.blocks import BlockFormat
from tests.helpers import block_cases as cases

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize("form", cases.FORMATS, ids=str)
def test_formats(form: BlockFormat) -> None:
    assert blocks.choose(torch.device("cuda")) == (cuda_blocks, None)
    for numel in (*cases.SIZES, 1_000_003):
        cases.check_format(cuda_blocks, form, 3, numel, BF16, F32, "cuda", beta=0.8)
        cases.check_format(cuda_blocks, form, 2, numel, F32, F32, "cuda")
        cases.check_format(cuda_blocks, form, 2, numel, F16, None, "cuda")
    cases.check_not_finite(cuda_blocks, form, "cuda")
    cases.check_extremes(cuda_blocks, form, "cuda")


def test_gpu_and_cpu_give_the_same_bytes() -> None:
    for form in (BlockFormat(8), BlockFormat(4)):
        values = cases.values_of(3, 100_003, BF16)
        assert torch.equal(form.write(values.cuda()).cpu()[:, :50_000], form.write(values)[:, :50_000])


@pytest.mark.alone
@pytest.mark.parametrize("form", cases.FORMATS[:3], ids=str)
def test_speed(form: BlockFormat) -> None:
    """Writing and reading take less than four copies of the values: they are a pass over memory."""
    values = torch.randn(1, 1 << 27, device="cuda", dtype=BF16)
    out, copied = form.write(values), torch.empty_like(values)
    form.read(out, copied)

    def seconds(call: object) -> float:
        best = float("inf")
        for _ in range(5):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()  # type: ignore[operator]
            end.record()
            torch.cuda.synchronize()
            best = min(best, begin.elapsed_time(end))
        return best

    copy = seconds(lambda: copied.copy_(values))
    write, read = seconds(lambda: form.write(values, out=out)), seconds(lambda: form.read(out, copied))
    print(f"{form}: copy {copy:.3f} ms, write {write:.3f} ms, read {read:.3f} ms")
    assert write < 4 * copy
    assert read < 4 * copy
