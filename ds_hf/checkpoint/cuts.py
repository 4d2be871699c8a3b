"""Which part of a whole parameter a process has, in a model that is divided over several.

whole [6, 4], Cut(dim=0, ranges=((2, 2),), whole=(6, 4))           rows 2 and 3 are here: local shape [2, 4]
whole [8, 4], Cut(dim=0, ranges=((0, 2), (4, 2)), whole=(8, 4))    rows 0, 1, 4 and 5, as of two packed matrices
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Cut", "tiles"]


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


def tiles(ranges: Iterable[tuple[int, int]], length: int, *, partly: bool = False) -> bool:
    """Whether ``(first, count)`` ranges cover the indices 0 to ``length`` exactly once; ``partly``: at most once."""
    end = 0
    for first, count in sorted(ranges):
        if count < 1 or first < end or (first > end and not partly):
            return False
        end = first + count
    return end <= length if partly else end == length
