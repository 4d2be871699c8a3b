"""Cuts: which part of a whole parameter a process holds in a model-parallel model (tensor parallelism, experts).

A cut parameter is an ordinary, smaller parameter to everything that computes on it. What reads or writes it by its
place in the whole (checkpoints, exports, loaders) asks ``cut_of``; a parameter without a cut is whole.

    whole [6, 4], Cut(dim=0, ranges=((2, 2),), whole=(6, 4))           rows 2 and 3 are here: local shape [2, 4]
    whole [8, 4], Cut(dim=0, ranges=((0, 2), (4, 2)), whole=(8, 4))    rows 0, 1, 4 and 5, as of two packed matrices
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Cut", "cut_of", "even_cut", "is_cut", "is_marked", "part_of_stack", "set_cut", "tiles", "whole_shape"]

_ATTRIBUTE = "_ds_cut"


@dataclass(frozen=True)
class Cut:
    """The index ranges of one dimension of a whole parameter that are here, all other dimensions being complete.

    Attributes:
        dim: the dimension that is cut, not negative.
        ranges: ``(first index, number of indices)`` in the whole, in the order in which they lie in the local tensor.
        whole: shape of the whole parameter.

    Raises:
        ValueError: the ranges are empty, overlap, or do not lie in the whole.
    """

    dim: int
    ranges: tuple[tuple[int, int], ...]
    whole: torch.Size

    def __post_init__(self) -> None:
        object.__setattr__(self, "whole", torch.Size(self.whole))
        object.__setattr__(self, "ranges", tuple((int(first), int(count)) for first, count in self.ranges))
        if not 0 <= self.dim < len(self.whole):
            raise ValueError(f"dimension {self.dim} is cut, and the whole parameter has shape {tuple(self.whole)}")
        length = self.whole[self.dim]
        if not self.ranges or not tiles(self.ranges, length, partly=True):
            raise ValueError(
                f"{list(self.ranges)} are not separate ranges of the {length} indices of dimension {self.dim}"
            )

    @property
    def shape(self) -> torch.Size:
        """Of the local tensor."""
        return torch.Size([*self.whole[: self.dim], sum(n for _, n in self.ranges), *self.whole[self.dim + 1 :]])

    def take(self, whole: Tensor) -> Tensor:
        """The local tensor, cut out of ``whole``: a view if it is one range, else a copy."""
        parts = [whole.narrow(self.dim, first, count) for first, count in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def put(self, whole: Tensor, local: Tensor) -> None:
        """Copy ``local`` to its places in ``whole``."""
        counts = [count for _, count in self.ranges]
        for (first, count), part in zip(self.ranges, torch.split(local, counts, self.dim), strict=True):
            whole.narrow(self.dim, first, count).copy_(part)


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


def tiles(ranges: Iterable[tuple[int, int]], length: int, *, partly: bool = False) -> bool:
    """Whether ``(first, count)`` ranges cover the indices 0 to ``length`` exactly once; ``partly``: at most once."""
    end = 0
    for first, count in sorted(ranges):
        if count < 1 or first < end or (first > end and not partly):
            return False
        end = first + count
    return end <= length if partly else end == length
