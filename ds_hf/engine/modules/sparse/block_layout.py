"""A layout ready to be used: as a mask of tokens for masked attention, as tiles for flex_attention.

flex_attention skips *tiles* of 128 x 128 scores. A tile is *full* when all of its scores are computed, *partial* when
some are: there a function of the position decides. Blocks of the layout may have any size; counts over stretches of
cells (a summed-area table) say which tiles they fill.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["TILE", "BlockLayout", "Tiles"]

TILE = 128


@dataclass(frozen=True)
class Tiles:
    """For each tile, bool ``[batch or 1, heads or 1, query tiles, key tiles]``: some score, every score is computed."""

    some: Tensor
    every: Tensor

    def both(self, other: Tiles) -> Tiles:
        """Where both conditions hold."""
        return Tiles(self.some & other.some, self.every & other.every)


class BlockLayout:
    """Cells of ``block`` x ``block`` scores.

    Args:
        cells: bool ``[heads or 1, blocks, blocks]``; 1 head stands for all.
        block: tokens along the side of a cell.
    """

    def __init__(self, cells: Tensor, block: int) -> None:
        self.cells = cells.to(torch.bool)
        self.block = block
        self._kept: dict[tuple[Any, ...], Any] = {}

    @property
    def heads(self) -> int:
        """Layouts that differ."""
        return self.cells.shape[0]

    def on(self, device: torch.device) -> Tensor:
        """The cells on ``device``."""
        cells: Tensor = self.keep(("cells", device), lambda: self.cells.to(device))
        return cells

    def mask(self, queries: int, keys: int, device: torch.device, *, start: Any = 0, key_start: int = 0) -> Tensor:
        """bool ``[heads or 1, queries, keys]``: which scores are computed.

        Args:
            start, key_start: position of the first query and of the first key in the sequence.
        """

        def make() -> Tensor:
            rows = (torch.arange(queries, device=device) + start) // self.block
            columns = (torch.arange(keys, device=device) + key_start) // self.block
            return self.on(device)[:, rows[:, None], columns[None, :]]

        if isinstance(start, Tensor):
            return make()
        mask: Tensor = self.keep(("mask", queries, keys, start, key_start, device), make)
        return mask

    def tiles(self, length: int, device: torch.device) -> Tiles:
        """The tiles of ``length`` queries and keys, ``[1, heads or 1, tiles, tiles]``."""
        tiles: Tiles = self.keep(("tiles", length, device), lambda: self._tiles(length, device))
        return tiles

    def _tiles(self, length: int, device: torch.device) -> Tiles:
        starts = torch.arange(0, length, TILE, device=device)
        low, high = starts // self.block, (torch.clamp(starts + TILE, max=length) - 1) // self.block + 1
        table = torch.nn.functional.pad(self.on(device).int().cumsum(1).cumsum(2), (1, 0, 1, 0))
        upper, lower = table[:, high], table[:, low]
        counts = upper[:, :, high] - upper[:, :, low] - lower[:, :, high] + lower[:, :, low]
        wide = high - low
        return Tiles((counts > 0)[None], (counts == wide[:, None] * wide[None, :])[None])

    def keep(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """``make()``, once for each of the last few keys: masks are large, and lengths vary."""
        if key not in self._kept:
            for old in list(self._kept)[: max(0, len(self._kept) - 5)]:
                del self._kept[old]
            self._kept[key] = make()
        return self._kept[key]
