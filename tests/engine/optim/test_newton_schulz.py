"""The iterations against the polynomial that they stand for, applied to singular values in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ds_hf.engine.optim.newton_schulz import (
    ns_compute_dtype,
    orthogonalized,
    zeropower_via_gram_newtonschulz,
    zeropower_via_newtonschulz5,
)

BOTH = (zeropower_via_newtonschulz5, zeropower_via_gram_newtonschulz)
SHAPES = ((8, 8), (5, 12), (12, 5), (1, 7), (7, 1), (1, 1), (3, 7, 9), (2, 2, 9, 4))


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_singular_values(matrices: Tensor, steps: int = 5) -> Tensor:
    """U f(S) V^T with f the fivefold polynomial: no matrix product of the iteration in it."""
    left, values, right = torch.linalg.svd(matrices, full_matrices=False)
    values = values / (values.square().sum(-1, keepdim=True).sqrt() + 1e-7)
    for _ in range(steps):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left @ torch.diag_embed(values) @ right


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("iterate", BOTH)
def test_is_the_polynomial_of_the_singular_values(iterate: Callable[..., Tensor], shape: tuple[int, ...]) -> None:
    matrices = draw(*shape)
    # the smallest singular values grow 3.4445^5 = 485 times, and rounding with them
    torch.testing.assert_close(iterate(matrices, 5), by_singular_values(matrices), rtol=0, atol=485 * 1e-14)
    torch.testing.assert_close(iterate(matrices.float(), 5).double(), by_singular_values(matrices), rtol=0, atol=2e-5)


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 7])
def test_other_numbers_of_steps(steps: int) -> None:
    matrices = draw(6, 11)
    for iterate in BOTH:
        torch.testing.assert_close(iterate(matrices, steps), by_singular_values(matrices, steps), rtol=0, atol=1e-11)


def test_singular_values_come_near_one() -> None:
    """Every value from 0.4 % of the matrix's norm on ends between 0.68 and 1.21."""
    values = torch.linspace(0.004, 0.2, 60, dtype=torch.float64)
    values = torch.cat([values, torch.sqrt(1 - values.square().sum())[None]])
    left, _ = torch.linalg.qr(draw(61, 61))
    right, _ = torch.linalg.qr(draw(61, 61, seed=1))
    found = torch.linalg.svdvals(zeropower_via_newtonschulz5(left @ torch.diag(values) @ right, 5))
    assert float(found.min()) > 0.68
    assert float(found.max()) < 1.21


@pytest.mark.parametrize(
    ("iterate", "dtype", "limit"), [(BOTH[1], torch.float16, 0.005), (BOTH[0], torch.bfloat16, 0.02)]
)
@pytest.mark.parametrize("shape", [(128, 128), (128, 300), (300, 96), (3, 64, 200)])
def test_sixteen_bits_as_on_a_gpu(
    iterate: Callable[..., Tensor],
    dtype: torch.dtype,
    limit: float,
    shape: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ds_hf.engine.optim.newton_schulz.ns_compute_dtype", lambda *_: dtype)
    matrices = draw(*shape)
    found, expected = iterate(matrices.float(), 5), by_singular_values(matrices)
    assert found.dtype == dtype
    assert float((found.double() - expected).norm() / expected.norm()) < limit


@pytest.mark.parametrize("iterate", BOTH)
def test_the_scale_does_not_matter(iterate: Callable[..., Tensor]) -> None:
    """Nor how far it is from what fp16 holds; only norms near the 1e-7 of the rule shrink the result."""
    matrix = draw(5, 9).float()
    for factor in (1e-3, 1e9):
        torch.testing.assert_close(iterate(matrix * factor, 5), iterate(matrix, 5), rtol=0, atol=1e-3)
    tiny = matrix / matrix.norm() * 1e-11
    assert float(torch.linalg.matrix_norm(iterate(tiny, 5))) < 485 * 1.01e-4


@pytest.mark.parametrize("iterate", BOTH)
def test_zeros_stay_zero_and_empty_stays_empty(iterate: Callable[..., Tensor]) -> None:
    assert not iterate(torch.zeros(3, 4), 5).any()
    assert iterate(torch.zeros(0, 4), 5).shape == (0, 4)
    assert iterate(torch.zeros(3, 0), 5).shape == (3, 0)
    with pytest.raises(ValueError, match=r"matrices.*\(3,\)"):
        iterate(torch.zeros(3), 5)


@pytest.mark.parametrize("method", ["gram", "standard"])
def test_several_at_once_are_each_alone(method: str) -> None:
    matrices = [draw(*shape, seed=i) for i, shape in enumerate([(4, 6), (6, 4), (4, 6), (3, 4, 6), (4, 6)])]
    before = [matrix.clone() for matrix in matrices]
    for matrix, kept, found in zip(matrices, before, orthogonalized(matrices, method), strict=True):
        torch.testing.assert_close(found, by_singular_values(matrix), rtol=0, atol=1e-11)
        assert torch.equal(matrix, kept)
    assert orthogonalized([], method) == []


def test_dtypes() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert ns_compute_dtype("gram", cpu) == ns_compute_dtype("standard", cpu) == torch.float32
    assert ns_compute_dtype("gram", gpu) == torch.float16
    assert ns_compute_dtype("standard", gpu) == torch.bfloat16
    assert zeropower_via_newtonschulz5(draw(3, 4).bfloat16(), 5).dtype == torch.float32
