"""Newton-Schulz iterations that make matrices nearly orthogonal: what Muon does to its momentum.

Five steps of the odd polynomial ``x -> a x + b x^3 + c x^5`` (Jordan 2024, https://kellerjordan.github.io/posts/muon/)
take every singular value of a matrix of Frobenius norm 1 to about 1 (0.7 to 1.2; those below 1e-3 stay smaller) and
leave the singular vectors. "standard" iterates on the matrix, "gram" on its small square Gram matrix: the same
polynomial, cheaper for matrices that are not square.

Shapes: ``[..., rows, columns]``; leading dims are a batch. Names and arguments of the two functions are DeepSpeed's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = [
    "NS_METHODS",
    "ns_compute_dtype",
    "orthogonalized",
    "zeropower_via_gram_newtonschulz",
    "zeropower_via_newtonschulz5",
]

NS_METHODS = ("gram", "standard")
STEPS = 5

_A, _B, _C = 3.4445, -4.7750, 2.0315
_EPS = 1e-7
_RESTART = 2  # 16-bit products of the Gram matrix drift from the matrix they stand for: it is made anew here


def ns_compute_dtype(ns_method: str = "gram", device: torch.device | None = None) -> torch.dtype:
    """The dtype that the iteration runs in: fp16 or bf16 ("standard") on a GPU, fp32 on the CPU."""
    on_gpu = torch.cuda.is_available() if device is None else device.type == "cuda"
    if not on_gpu:
        return torch.float32
    return torch.float16 if ns_method == "gram" else torch.bfloat16


def zeropower_via_newtonschulz5(G: Tensor, steps: int = STEPS) -> Tensor:  # noqa: N803  DeepSpeed's spelling
    """``G`` made nearly orthogonal, in ``ns_compute_dtype("standard")``."""
    return _unfolded(G, "standard", lambda wide: _on_matrix(wide, steps))


def zeropower_via_gram_newtonschulz(G: Tensor, steps: int = STEPS) -> Tensor:  # noqa: N803  DeepSpeed's spelling
    """``G`` made nearly orthogonal, in ``ns_compute_dtype("gram")``."""
    return _unfolded(G, "gram", lambda wide: _on_gram(wide, steps))


def orthogonalized(matrices: Sequence[Tensor], ns_method: str) -> list[Tensor]:
    """Every matrix made nearly orthogonal, in the dtype of the iteration; those of one shape in one batch."""
    alike: dict[tuple[torch.Size, torch.dtype], list[int]] = {}
    for index, matrix in enumerate(matrices):
        alike.setdefault((matrix.shape, matrix.dtype), []).append(index)
    result = list(matrices)
    iterate = zeropower_via_gram_newtonschulz if ns_method == "gram" else zeropower_via_newtonschulz5
    for indices in alike.values():
        done = iterate(torch.stack([matrices[index] for index in indices]))
        for index, matrix in zip(indices, done, strict=True):
            result[index] = matrix
    return result


def _unfolded(given: Tensor, ns_method: str, iterate: Callable[[Tensor], Tensor]) -> Tensor:
    """``iterate`` over ``given`` as a batch ``[batch, short, long]`` of Frobenius norms 1."""
    if given.dim() < 2:
        raise ValueError(f"only matrices can be made orthogonal, not a tensor of shape {tuple(given.shape)}")
    if given.numel() == 0:
        return given
    matrices = given.reshape(-1, *given.shape[-2:])
    tall = matrices.shape[-2] > matrices.shape[-1]
    wide = matrices.mT if tall else matrices
    # Scaled in fp32 before the cast: fp16 ends at 65504, and momenta may be far below its smallest number.
    wide = wide if wide.dtype is torch.float64 else wide.float()
    wide = wide / (wide.norm(dim=(-2, -1), keepdim=True) + _EPS)
    if wide.dtype is not torch.float64:
        wide = wide.to(ns_compute_dtype(ns_method, given.device))
    done = iterate(wide)
    return (done.mT if tall else done).reshape(given.shape)


def _on_matrix(x: Tensor, steps: int) -> Tensor:
    for _ in range(steps):
        x = torch.baddbmm(x, _without_identity(x @ x.mT), x, beta=_A)
    return x


def _on_gram(x: Tensor, steps: int) -> Tensor:
    """The factors of all steps are collected in a small square matrix, and multiplied into ``x`` at the end."""
    if x.shape[-2] >= x.shape[-1]:
        return _on_matrix(x, steps)
    gram = x @ x.mT
    factors: Tensor | None = None
    for step in range(steps):
        if step == _RESTART and factors is not None:
            x = factors @ x
            gram, factors = x @ x.mT, None
        rest = _without_identity(gram)
        if factors is None:
            factors = rest.clone()
            factors.diagonal(dim1=-2, dim2=-1).add_(_A)
        else:
            factors = torch.baddbmm(factors, rest, factors, beta=_A)
        if step + 1 not in (steps, _RESTART):  # else it is not needed any more
            for _ in range(2):  # a step's factor stands on both sides of the Gram matrix, and commutes with it
                gram = torch.baddbmm(gram, rest, gram, beta=_A)
    return x if factors is None else factors @ x


def _without_identity(gram: Tensor) -> Tensor:
    """``b G + c G^2``: what a step multiplies by, but for the identity times ``a``."""
    return torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C)
