"""Rows added up and the gate of experts: the kernels, run thread by thread on the host, against torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ds_hf.engine.ops import cuda_build, cuda_launch, rows
from tests.helpers import cubin
from tests.helpers.cuda_emulator import emulate

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def emulated(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(tmp_path_factory, monkeypatch)
    monkeypatch.setattr(rows, "TUNING", cuda_launch.Tuning(threads=64, blocks=1))
    monkeypatch.setattr(rows, "_by_kernel", lambda x: True)


def lists(places: int, n: int, m: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(m)
    counts = torch.bincount(torch.randint(0, places - 1, (m,), generator=generator), minlength=places)  # the last: none
    return torch.randint(0, n, (m,), generator=generator), counts.cumsum(0) - counts


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 24, 72])
def test_rows_are_added_up_in_fp32(emulated: Any, dtype: torch.dtype, width: int) -> None:
    x = torch.randn(11, width, generator=torch.Generator().manual_seed(width)).to(dtype)
    items, starts = lists(6, 11, 17)
    wanted = torch.zeros(6, width)
    ends = [*starts.tolist()[1:], len(items)]
    for place, (start, end) in enumerate(zip(starts.tolist(), ends, strict=True)):
        for item in items[start:end]:
            wanted[place] += x[item].float()
    assert torch.equal(rows.add_up(x, items, starts), wanted.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("of_scale", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [3, 40, 600])
def test_rows_times_numbers(
    emulated: Any, dtype: torch.dtype, of_scale: torch.dtype, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit as torch rounds; the sums of the numbers' gradients without rounding between."""
    generator = torch.Generator().manual_seed(width)
    x, grad = (torch.randn(19, width, generator=generator).to(dtype) for _ in range(2))
    scale = torch.rand(19, 1, generator=generator).to(of_scale)
    sums = (x.double() * grad.double()).sum(1, keepdim=True)
    for kernel in (True, False):
        monkeypatch.setattr(rows, "_by_kernel", lambda x, kernel=kernel: kernel)
        assert torch.equal(rows.weigh(x, scale), (x * scale).to(dtype))
        of_x, of_numbers = rows.weigh_backward(grad, x, scale)
        assert torch.equal(of_x, (grad * scale).to(dtype))
        assert of_numbers.dtype == of_scale
        rounds = torch.bfloat16 in (dtype, of_scale) or (dtype is torch.float16 and not kernel)
        close = 0.02 if rounds else 1e-5
        torch.testing.assert_close(of_numbers.double(), sums, rtol=close, atol=close * width**0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [3, 16, 40])
def test_the_gate_and_its_gradient(
    emulated: Any, dtype: torch.dtype, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(5, 2 * width, generator=generator).mul(3).to(dtype).requires_grad_()
    grad = torch.randn(5, width, generator=generator).to(dtype)
    gates, ups = x.chunk(2, -1)
    wanted = torch.nn.functional.silu(gates) * ups
    wanted.backward(grad)
    close = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype]
    found = rows.gate(x.detach())
    torch.testing.assert_close(found, wanted.detach(), rtol=close, atol=close)
    assert dtype is torch.float32 or (found == wanted).float().mean() > 0.9  # the last bit of the exponential
    torch.testing.assert_close(rows.gate_backward(grad, x.detach()), x.grad, rtol=close, atol=close)
    monkeypatch.setattr(rows, "_by_kernel", lambda x: False)
    torch.testing.assert_close(rows.gate_backward(grad, x.detach()), x.grad, rtol=close / 10, atol=close / 10)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [3, 16, 40])
def test_halves_that_lie_apart(emulated: Any, dtype: torch.dtype, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same gradients as of one tensor with both, and the product again: by kernels to the bit."""
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(5, 2 * width, generator=generator).mul(3).to(dtype)
    grad = torch.randn(5, width, generator=generator).to(dtype)
    both = [half.contiguous() for half in x.chunk(2, -1)]
    for kernel in (True, False):
        monkeypatch.setattr(rows, "_by_kernel", lambda x, kernel=kernel: kernel)
        wanted = [*rows.gate_backward(grad, x).chunk(2, -1), rows.gate(x)]
        found = rows.halves_backward(grad.clone(), *both, "silu")
        for mine, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, other, rtol=0 if kernel else 1e-6, atol=0 if kernel else 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", ["gelu", "gelu_tanh"])
def test_other_activations(
    emulated: Any, dtype: torch.dtype, act: rows.Activation, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(4)
    gates, ups, grad = (torch.randn(5, 24, generator=generator).mul(k).to(dtype) for k in (3, 3, 1))
    given = gates.clone().requires_grad_(), ups.clone().requires_grad_()
    product = rows.activation(act, given[0]) * given[1]
    product.backward(grad)
    close = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype]
    wanted = [given[0].grad, given[1].grad, product.detach()]
    for kernel in (True, False):
        monkeypatch.setattr(rows, "_by_kernel", lambda x, kernel=kernel: kernel)
        found = rows.halves_backward(grad.clone(), gates, ups, act)
        for mine, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, other, rtol=close, atol=close)
            assert dtype is torch.float32 or (mine == other).float().mean() > 0.9  # where it rounds, and the last bit


@pytest.mark.skipif(cubin.compiler() is None, reason="neither NVRTC nor nvcc is here")
def test_cuda_compiles_and_spills_nothing() -> None:
    for value, act, other in ((0, 0, 0), (1, 0, 0), (1, 1, 1), (1, 2, 2), (2, 0, 2)):
        macros = (*rows.TUNING.macros, ("DS_VALUE", value), ("DS_GATE", act), ("DS_OTHER", other))
        frames = cubin.frame_nbytes(cubin.compiled(cuda_build.program_text("rows.cu", macros), "sm_90"))
        assert len(frames) >= 3
        assert max(frames.values()) <= 8, frames
