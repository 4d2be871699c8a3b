"""Cuts: which part of a whole parameter a process holds in a model-parallel model (tensor parallelism, experts).

A cut parameter is an ordinary, smaller parameter to everything that computes on it. What reads or writes it by its
place in the whole (checkpoints, exports, loaders) asks ``cut_of``; a parameter without a cut is whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_hf.checkpoint.cuts import Cut

__all__ = ["Cut", "cut_of", "even_cut", "is_cut", "is_marked", "part_of_stack", "set_cut", "whole_shape"]

_ATTRIBUTE = "_ds_cut"


def even_cut(local: Sequence[int], dim: int, rank: int, size: int, stride: int = 1) -> Cut:
    """The cut of process ``rank`` of ``size`` that hold equal parts, as Megatron-LM's layers are laid out.

    Args:
        local: shape of what each process holds.
        dim: Megatron's ``partition_dim``; negative counts from the end.
        stride: Megatron's ``partition_stride``: so many matrices are packed along ``dim``, each of which is cut.

    Raises:
        ValueError: there is no such dimension, or its length is no multiple of ``stride``.
    """
    if not -len(local) <= dim < len(local):
        raise ValueError(f"partition_dim is {dim}, and the parameter has shape {tuple(local)}")
    dim %= len(local)
    if stride < 1 or local[dim] % stride:
        raise ValueError(
            f"partition_stride is {stride}, which does not divide the {local[dim]} indices of dimension {dim}"
        )
    part = local[dim] // stride
    ranges = tuple(((piece * size + rank) * part, part) for piece in range(stride))
    if part == 0:
        raise ValueError(f"dimension {dim} of shape {tuple(local)} is empty and cannot be cut")
    whole = torch.Size([*local[:dim], local[dim] * size, *local[dim + 1 :]])
    return Cut(dim, ranges, whole)


def part_of_stack(local: Sequence[int], rank: int, size: int) -> Cut:
    """The cut of process ``rank`` of ``size`` that hold parts of a whole which nothing says how to put together: they
    count as slices of a stack ``[size, *local]``, so the shape of the cut has a first dimension more than the tensor.
    """
    return Cut(0, ((rank, 1),), torch.Size([size, *local]))


def cut_of(param: Tensor) -> Cut | None:
    """The cut of a parameter, ``None`` if this process holds the whole of it (before ZeRO divides it)."""
    return getattr(param, _ATTRIBUTE, None)


def is_marked(param: Tensor) -> bool:
    """The model's author says that processes hold different parts: Megatron-LM's mark, of old or now."""
    return bool(getattr(param, "tensor_model_parallel", False) or getattr(param, "model_parallel", False))


def is_cut(param: Tensor) -> bool:
    """Whether this process holds a part of the parameter; a mark says so before there is a ``cut_of``."""
    return cut_of(param) is not None or is_marked(param)


def set_cut(param: Tensor, cut: Cut) -> None:
    """Mark ``param`` as the part of a whole that ``cut`` says."""
    setattr(param, _ATTRIBUTE, cut)


def whole_shape(param: Tensor, local: torch.Size) -> torch.Size:
    """Shape of the whole parameter; ``local`` is what it is without a cut, also while the parameter is released."""
    cut = cut_of(param)
    return local if cut is None else cut.whole
