"""Flat layouts: where each parameter of a unit lies in one flat buffer, and what part of it each rank owns.

Invariant: parameters follow one another, each start is a multiple of the alignment, in elements, the whole is padded
once so that every rank's shard has the same number of elements. All figures are elements, never bytes.

    full  [numel] = | p0 | gap | p1 | gap | ... | padding |      shard r = full[r * shard_numel : (r + 1) * shard_numel]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["ALIGNMENT", "FlatLayout", "Fragment", "Labels", "Slot"]

ALIGNMENT = 16  # elements: 32 bytes at 16 bits, so that vector loads and GEMM operands start aligned


@dataclass(frozen=True)
class Slot:
    """Place of one parameter in the full buffer."""

    index: int
    shape: torch.Size
    offset: int
    numel: int

    @property
    def end(self) -> int:
        return self.offset + self.numel

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Of the parameter where it lies, contiguous."""
        return torch.empty(self.shape, device="meta").stride()

    def of(self, full: Tensor) -> Tensor:
        """The parameter in ``full``, as a view: ``[numel]`` to its shape, in the same dtype."""
        return full.as_strided(self.shape, self.strides, full.storage_offset() + self.offset)


@dataclass(frozen=True)
class Fragment:
    """The part of one parameter that lies in one shard.

    Attributes:
        slot: the parameter's place.
        start: first element inside the (flattened) parameter.
        shard_start: where it lies in the shard.
        numel: number of elements, at least 1.
    """

    slot: Slot
    start: int
    shard_start: int
    numel: int

    @property
    def whole(self) -> bool:
        return self.numel == self.slot.numel


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


class FlatLayout:
    """Layout of parameters with the given shapes, cut into ``world_size`` equal shards.

    Args:
        alignment: elements; 1 where nothing computes on the shards, and padding would be most of a small parameter.
    """

    def __init__(self, shapes: Sequence[torch.Size], world_size: int, alignment: int = ALIGNMENT) -> None:
        slots: list[Slot] = []
        end = 0
        for index, shape in enumerate(shapes):
            offset = _round_up(end, alignment)
            slots.append(Slot(index, shape, offset, shape.numel()))
            end = offset + shape.numel()
        self.slots: tuple[Slot, ...] = tuple(slots)
        self.world_size = world_size
        self.numel = _round_up(max(end, 1), alignment * world_size)
        self.shard_numel = self.numel // world_size

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """``(start, end)`` of every stretch that belongs to no parameter."""
        ends = (0, *(slot.end for slot in self.slots))
        starts = (*(slot.offset for slot in self.slots), self.numel)
        return tuple((end, start) for end, start in zip(ends, starts, strict=True) if end < start)

    @cached_property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """``(start, end)`` of every parameter."""
        return tuple((slot.offset, slot.end) for slot in self.slots)

    @cached_property
    def stretches(self) -> tuple[tuple[int, int], ...]:
        """``(start, end)`` of what lies between the gaps."""
        starts, ends = zip(*self.gaps, strict=True) if self.gaps else ((), ())
        pairs = zip((0, *ends), (*starts, self.numel), strict=True)
        return tuple((start, end) for start, end in pairs if start < end)

    def empty(self, dtype: torch.dtype, device: torch.device, *, missing: bool) -> Tensor:
        """``[numel]`` of ``dtype`` whose gaps are zero.

        Args:
            missing: all of it is: not every parameter will be written.
        """
        if missing:
            return torch.zeros(self.numel, dtype=dtype, device=device)
        flat = torch.empty(self.numel, dtype=dtype, device=device)
        for start, end in self.gaps:
            flat[start:end].zero_()
        return flat

    @cached_property
    def _places(self) -> tuple[tuple[torch.Size, tuple[int, ...], int], ...]:
        return tuple((slot.shape, slot.strides, slot.offset) for slot in self.slots)

    def views(self, full: Tensor) -> list[Tensor]:
        """All parameters in ``full``, ``[numel]``, in their shapes and its dtype. It begins where its storage does: in
        each backward, so in as few calls."""
        return [full.as_strided(shape, strides, offset) for shape, strides, offset in self._places]

    def shard_range(self, rank: int) -> tuple[int, int]:
        """``(start, end)`` of the rank's shard in the full buffer."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def fragments(self, rank: int, *, whole: bool = False) -> Iterator[Fragment]:
        """Parts of parameters in the rank's shard, in order; in the full buffer when ``whole``."""
        low, high = (0, self.numel) if whole else self.shard_range(rank)
        for slot in self.slots:
            start, end = max(slot.offset, low), min(slot.end, high)
            if start < end:
                yield Fragment(slot, start - slot.offset, start - low, end - start)


class Labels(NamedTuple):
    """What the log of collectives calls a buffer and what belongs to it."""

    name: str
    weights: str
    gradients: str
    states: str

    @classmethod
    def of(cls, name: str) -> Labels:
        """``name``: the path of its module."""
        return cls(name, f"the weights of {name}", f"the gradients of {name}", f"an optimizer state of {name}")
