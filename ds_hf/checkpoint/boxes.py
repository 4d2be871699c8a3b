"""Where the elements of slices lie in a whole parameter, and whether slices are the whole of it."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from ds_hf.checkpoint.format import SavedCut, SavedFragment

__all__ = ["Box", "boxes", "cover_fault"]


def cover_fault(shape: Sequence[int], fragments: Sequence[SavedFragment]) -> str:
    """What keeps fragments from being each element of a parameter once, as the end of a sentence; empty when they are.

    Those of a slice have to follow one another, and the slices of a parameter are cut along the same dim.
    """
    ends: dict[int, int] = {}  # by identity: a cut may have many ranges
    cuts: dict[int, SavedCut | None] = {}
    for fragment in fragments:
        key = id(fragment.cut)
        cuts[key], end = fragment.cut, ends.get(key, 0)
        if fragment.start != end or fragment.numel == 0:
            return f"do not follow one another at element {end}"
        ends[key] = end + fragment.numel
    slices = [cut for cut in cuts.values() if cut is not None]
    if not slices:
        end, numel = sum(ends.values()), math.prod(shape)
        return "" if end == numel else f"have {end} elements, its shape {list(shape)} has {numel}"
    dim = slices[0].dim
    if len(slices) < len(cuts) or any(cut.dim != dim for cut in slices) or dim >= len(shape):
        return f"are of slices that are not parts of one dimension of its shape {list(shape)}"
    end = 0
    for first, count in sorted(pair for cut in slices for pair in cut.ranges):
        if first != end or count == 0:
            times = "not at all" if first > end else "more than once"
            return f"hold index {min(first, end)} of dimension {dim} of its shape {list(shape)} {times}"
        end += count
    if end != shape[dim]:
        return f"hold {end} indices of dimension {dim} of its shape {list(shape)}"
    for cut in slices:
        if ends[id(cut)] != cut.numel(shape):
            return f"have {ends[id(cut)]} of the {cut.numel(shape)} elements of a slice of its shape {list(shape)}"
    return ""


@dataclass(frozen=True)
class Box:
    """Elements of a whole parameter, and where they lie in a flattened slice of it.

    Attributes:
        ranges: from where to where in each dim of the whole, as ``_joined`` gives them.
        strides: of the slice in these dims.
        offset: of the first element, in the slice.
    """

    ranges: tuple[tuple[int, int], ...]
    strides: tuple[int, ...]
    offset: int

    def part(self, other: Box) -> tuple[tuple[int, int], ...] | None:
        """What both have, ``None`` for nothing."""
        both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(self.ranges, other.ranges, strict=True))
        return both if all(low < high for low, high in both) else None

    def place(self, ranges: Sequence[tuple[int, int]]) -> int:
        """Where in the slice a part of the box begins."""
        corners = zip(ranges, self.ranges, self.strides, strict=True)
        return self.offset + sum((low - start) * stride for (low, _), (start, _), stride in corners)

    def view(self, flat: Tensor, start: int, ranges: Sequence[tuple[int, int]]) -> Tensor:
        """A part of the box in ``flat``, which has the slice from element ``start`` on."""
        size = tuple(high - low for low, high in ranges)
        return flat.as_strided(size, self.strides, flat.storage_offset() + self.place(ranges) - start)


def boxes(shape: Sequence[int], cut: SavedCut | None, start: int, stop: int, *dims: int) -> Iterator[Box]:
    """Elements ``start`` to ``stop`` of a flattened slice of a parameter of ``shape``, as few boxes of the whole.

    Args:
        cut: ``None`` if the slice is the whole.
        dims: those that stay by themselves besides the one that is cut; other dims are joined to their neighbours.
    """
    sizes, place = _joined(shape, {*dims, *(() if cut is None else (cut.dim,))})
    at = len(sizes)
    if cut is not None:
        at = place[cut.dim]
        sizes[at] = cut.length
    strides = tuple(math.prod(sizes[index + 1 :]) for index in range(len(sizes)))
    for ranges in _stretch(sizes, start, stop):
        box = Box(ranges, strides, sum(low * stride for (low, _), stride in zip(ranges, strides, strict=True)))
        if cut is None:
            yield box
            continue
        bottom, top = ranges[at]
        for index in range(bisect.bisect_right(cut.starts, bottom) - 1, len(cut.ranges)):
            low, high = max(bottom, cut.starts[index]), min(top, cut.starts[index + 1])
            if low >= top:
                break
            shift = cut.ranges[index][0] - cut.starts[index]
            moved = (*ranges[:at], (low + shift, high + shift), *ranges[at + 1 :])
            yield Box(moved, strides, box.offset + (low - bottom) * strides[at])


def _joined(shape: Sequence[int], dims: set[int]) -> tuple[list[int], dict[int, int]]:
    """``shape`` with neighbouring dims joined but for ``dims``, and where these are in it."""
    sizes: list[int] = []
    places: dict[int, int] = {}
    end = 0
    for dim in sorted(dims):
        sizes += [math.prod(shape[end:dim]), shape[dim]]
        places[dim] = len(sizes) - 1
        end = dim + 1
    return [*sizes, math.prod(shape[end:])], places


def _stretch(sizes: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """The boxes that elements ``start`` to ``stop`` of a tensor of ``sizes`` are, at most two for each further dim."""
    if start >= stop:
        return
    if len(sizes) == 1:
        yield ((start, stop),)
        return
    row = math.prod(sizes[1:])
    (first, low), (last, high) = divmod(start, row), divmod(stop, row)
    if first == last:
        yield from (((first, first + 1), *rest) for rest in _stretch(sizes[1:], low, high))
        return
    if low:
        yield from (((first, first + 1), *rest) for rest in _stretch(sizes[1:], low, row))
        first += 1
    if first < last:
        yield ((first, last), *((0, size) for size in sizes[1:]))
    yield from (((last, last + 1), *rest) for rest in _stretch(sizes[1:], 0, high))
