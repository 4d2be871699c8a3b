"""Columns of the matrices in one shard: sums over them, which have the largest, where their elements are.

A column of a parameter ``[rows, ...]`` is what its rows have in one place: all that comes from one input of a Linear,
one feature of an embedding. A shard may begin and end within a row. What has fewer than two dimensions has no columns
and counts as chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ds_hf.engine.zero.layout import FlatLayout, Fragment, Slot
from ds_hf.engine.zero.storage import summed_in

__all__ = ["Columns"]


class Columns:
    """Of one buffer, as one process sees it.

    Args:
        layout: of the buffer.
        fragments: what of it lies in the shard.

    Attributes:
        counts: columns of each matrix, in the order of the layout.
    """

    def __init__(self, layout: FlatLayout, fragments: Sequence[Fragment]) -> None:
        self._slots = [slot for slot in layout.slots if _width(slot)]
        self._fragments = fragments
        self.counts = [_width(slot) for slot in self._slots]

    def sums(self, shard: Tensor) -> Tensor:
        """``[columns of all matrices]``, fp32: the sum of the sizes of what each has in ``shard``, flat."""
        found = torch.zeros(sum(self.counts), dtype=torch.float32, device=shard.device)
        places = dict(zip([slot.index for slot in self._slots], torch.split(found, self.counts), strict=True))
        for fragment in self._fragments:
            width = _width(fragment.slot)
            for first, start, end in _rows(fragment, width) if width else ():
                part = shard[start:end].view(-1, min(width, end - start))
                sizes = torch.linalg.vector_norm(part, ord=1, dim=0, dtype=summed_in(torch.float32, part.dtype))
                places[fragment.slot.index][first : first + len(sizes)] += sizes
        return found

    def largest(self, sums: Tensor, share: float) -> Tensor:
        """``[columns of all matrices]``, bool: whether a column is among this share of its matrix, at least one of
        each, by ``sums`` over all processes."""
        chosen = torch.zeros_like(sums, dtype=torch.bool)
        for part, of in zip(torch.split(chosen, self.counts), torch.split(sums, self.counts), strict=True):
            part[of.topk(max(1, int(len(of) * share))).indices] = True
        return chosen

    def positions(self, chosen: Tensor) -> Tensor:
        """Ascending positions in the shard of what lies in a chosen column or in no matrix, as int32 where that is
        enough."""
        places = dict(zip([slot.index for slot in self._slots], torch.split(chosen, self.counts), strict=True))
        found = [torch.empty(0, dtype=torch.int64, device=chosen.device)]
        last = 0
        for fragment in self._fragments:
            width, begin = _width(fragment.slot), fragment.shard_start
            last = begin + fragment.numel
            if not width:
                found.append(torch.arange(begin, last, device=chosen.device))
            for first, start, end in _rows(fragment, width) if width else ():
                of_row = places[fragment.slot.index][first : first + end - start].nonzero().flatten()
                rows = torch.arange(start, end, width, device=chosen.device)
                found.append((rows[:, None] + of_row).flatten())
        return torch.cat(found).to(torch.int32 if last < 2**31 else torch.int64)


def _width(slot: Slot) -> int:
    """Columns of the parameter, 0 if it is no matrix."""
    return slot.numel // slot.shape[0] if len(slot.shape) > 1 and slot.numel else 0


def _rows(fragment: Fragment, width: int) -> Iterator[tuple[int, int, int]]:
    """``(first column, start, end)`` in the shard: what is left of a row, whole rows, the beginning of one."""
    start, end = fragment.shard_start, fragment.shard_start + fragment.numel
    first = fragment.start % width
    if first:
        rest = min(start + width - first, end)
        yield first, start, rest
        start = rest
    whole = start + (end - start) // width * width
    if start < whole:
        yield 0, start, whole
    if whole < end:
        yield 0, whole, end
