"""The geometry that DeepSpeed's AutoTP writes of a parameter: of each rank the blocks that it holds.

A block (piece) has a shape, and offset and strides in the whole parameter and in the rank's slice, as
``torch.as_strided`` takes them. Where each rank has ranges of one dimension the blocks become cuts, so nothing is put
together before it is wanted; any other layout is rebuilt when it is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_hf.checkpoint.deepspeed.layout import count_of
from ds_hf.checkpoint.format import SavedCut

__all__ = ["AffineMap", "parse_affine_map"]

VERSION = 1
_POWERS = {"master": 1, "weight": 1, "exp_avg": -1, "exp_avg_sq": -2}  # gradients scale inversely


@dataclass(frozen=True)
class AffinePiece:
    """A block: ``(offset, strides)`` of its elements in the whole and in the slice, which has them ``scale`` times."""

    shape: tuple[int, ...]
    source: tuple[int, tuple[int, ...]]
    dest: tuple[int, tuple[int, ...]]
    owner: int
    scale: float

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class AffineMap:
    """How one parameter of ``shape`` is spread: of each rank the shape of its slice and its pieces."""

    shape: tuple[int, ...]
    slices: tuple[tuple[int, ...], ...]
    pieces: tuple[tuple[AffinePiece, ...], ...]

    @property
    def scaled(self) -> bool:
        return any(piece.scale != 1 for pieces in self.pieces for piece in pieces)

    @property
    def replicated(self) -> bool:
        """Whether each rank has the whole."""
        rows = _row_major(self.shape)
        return not self.scaled and all(
            len(pieces) == 1 and pieces[0].shape == self.shape and pieces[0].source == pieces[0].dest == (0, rows)
            for pieces in self.pieces
        )

    def cuts(self) -> tuple[SavedCut | None, ...] | None:
        """The ranges that each rank has of one dimension, ``None`` for a rank that has nothing; ``None`` for all where
        the layout is another."""
        if self.scaled or any(len(held) != len(self.shape) for held in self.slices):
            return None
        dims = [dim for dim, size in enumerate(self.shape) if any(held[dim] != size for held in self.slices)]
        if len(dims) != 1:
            return None
        dim, found = dims[0], []
        for shape, pieces in zip(self.slices, self.pieces, strict=True):
            ranges = _ranges(self.shape, shape, pieces, dim)
            if ranges is None:
                return None
            found.append(SavedCut(dim, ranges) if ranges else None)
        return tuple(found)

    def rebuild(self, slices: Sequence[Tensor], state: str) -> Tensor:
        """The whole, flat, of the flat slices of all ranks.

        Raises:
            ValueError: an element is in none of them, or ranks that hold the same differ.
        """
        whole = torch.empty(math.prod(self.shape), dtype=slices[0].dtype)
        known = torch.zeros(whole.numel(), dtype=torch.bool)
        power = _POWERS.get(state, 1)
        if power != 1 and self.scaled:
            raise ValueError(
                "its slices are multiples of its values, so that learning rate and eps of its moments are too: load "
                "with load_optimizer_states=False"
            )
        for rank, (held, pieces) in enumerate(zip(slices, self.pieces, strict=True)):
            held = held.contiguous()
            for piece in pieces:
                values = held.as_strided(piece.shape, piece.dest[1], held.storage_offset() + piece.dest[0])
                values = values if piece.scale == 1 else values / piece.scale**power
                into, seen = (t.as_strided(piece.shape, piece.source[1], piece.source[0]) for t in (whole, known))
                if piece.owner != rank and bool(seen.all()):
                    if not torch.equal(into, values):
                        raise ValueError(f"tensor-parallel ranks {piece.owner} and {rank} hold different values of it")
                    continue
                into.copy_(values)
                seen.fill_(True)
        if not bool(known.all()):
            raise ValueError(f"its slices lack {int((~known).sum())} of its {known.numel()} elements")
        return whole


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _ranges(
    whole: tuple[int, ...], held: tuple[int, ...], pieces: Sequence[AffinePiece], dim: int
) -> tuple[tuple[int, int], ...] | None:
    """Ranges of ``dim``, in the order of the slice."""
    outer, inner, end = _row_major(whole), _row_major(held), 0
    found: list[tuple[int, int]] = []
    for piece in sorted(pieces, key=lambda piece: piece.dest[0]):
        if piece.numel == 0:
            continue
        others = [n for at, n in enumerate(piece.shape) if at != dim]
        if len(piece.shape) != len(whole) or others != [n for at, n in enumerate(whole) if at != dim]:
            return None
        count, (first, rest) = piece.shape[dim], divmod(piece.source[0], outer[dim])
        if rest or piece.source[1] != outer or piece.dest != (end * inner[dim], inner):
            return None
        found.append((first, count))
        end += count
    return tuple(found) if end == held[dim] else None


def parse_affine_map(entry: Any, ranks: int) -> AffineMap:
    """Check what a file says.

    Raises:
        ValueError: it contradicts itself, or is of another number of ranks.
    """
    shape = _sizes(_get(entry, "logical_shape"))
    by_rank = _get(entry, "ranks")
    if not isinstance(by_rank, Mapping) or {str(rank) for rank in by_rank} != {str(rank) for rank in range(ranks)}:
        raise ValueError(f"its affine map is not of {ranks} tensor-parallel ranks")
    found = {int(rank): content for rank, content in by_rank.items()}
    slices, pieces = [], []
    for rank in range(ranks):
        held = _sizes(_get(found[rank], "shard_shape"))
        entries = _get(found[rank], "pieces")
        if not isinstance(entries, list):
            raise ValueError("its affine map has no list of pieces")
        row = tuple(_piece(piece, rank, shape, held) for piece in entries)
        if sum(piece.numel for piece in row) != math.prod(held):
            raise ValueError(f"the pieces of rank {rank} in its affine map are not the {math.prod(held)} of its slice")
        slices.append(held)
        pieces.append(row)
    if math.prod(shape) > sum(math.prod(held) for held in slices):
        raise ValueError("its affine map describes more elements than its slices have")
    return AffineMap(shape, tuple(slices), tuple(pieces))


def _piece(entry: Any, rank: int, whole: tuple[int, ...], held: tuple[int, ...]) -> AffinePiece:
    shape = _sizes(_get(entry, "shape"))
    places = []
    for key, around in (("source", whole), ("dest", held)):
        place = _get(entry, key)
        if not isinstance(place, list | tuple) or len(place) != 2:
            raise ValueError(f"{key} of a piece of its affine map is not [offset, strides]")
        offset, strides = count_of(place[0]), _sizes(place[1])
        if len(strides) != len(shape):
            raise ValueError(f"{key} of a piece of its affine map has not a stride for each dimension")
        last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        if math.prod(shape) and last >= math.prod(around):
            raise ValueError("a piece of its affine map reaches beyond the parameter")
        places.append((offset, strides))
    scale, holders = entry.get("scale", 1.0), _sizes(_get(entry, "locations"))
    if not isinstance(scale, int | float) or isinstance(scale, bool) or scale == 0 or not math.isfinite(scale):
        raise ValueError("a piece of its affine map has an impossible scale")
    return AffinePiece(shape, places[0], places[1], min(holders, default=rank), float(scale))


def _get(entry: Any, key: str) -> Any:
    if not isinstance(entry, Mapping) or key not in entry:
        raise ValueError(f"its affine map has no {key}")
    return entry[key]


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or len(value) > 64:
        raise ValueError("its affine map has something else where sizes are expected")
    sizes = tuple(count_of(n) for n in value)
    if math.prod(n for n in sizes if n) >= 2**63:
        raise ValueError("its affine map has an impossible size")
    return sizes
