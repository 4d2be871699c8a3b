"""Which blocks of the score matrix attention computes: the patterns of DeepSpeed's ``sparse_attention`` section.

A *layout* is an integer tensor ``[heads, rows, columns]`` with one cell for each block of ``block`` x ``block`` scores;
rows are queries, columns are keys, and 1 means computed. Names, arguments, defaults and values are those of
``deepspeed.ops.sparse_attention``, value by value. Patterns: Sparse Transformers (Child et al., arXiv 1904.10509),
BigBird (Zaheer et al., 2007.14062), Longformer (Beltagy et al., 2004.05150).

"unidirectional" is meant of blocks: a block on the diagonal is computed whole, and a mask has to hide the future in it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ds_hf.config.sparsity import (
    direction_error,
    global_blocks_error,
    local_windows_error,
    positive_error,
    windows_error,
)

__all__ = [
    "AttentionKindError",
    "BSLongformerSparsityConfig",
    "BigBirdSparsityConfig",
    "DenseSparsityConfig",
    "FixedSparsityConfig",
    "LocalSlidingWindowSparsityConfig",
    "PatternConfig",
    "SparsityConfig",
    "VariableSparsityConfig",
]


class AttentionKindError(ValueError, NotImplementedError):
    """A value of ``attention`` that does not exist: an ordinary wrong value, for which DeepSpeed raises the latter."""


def _require(*errors: str | None) -> None:
    for error in errors:
        if error is not None:
            raise ValueError(error)


def _require_kind(attention: Any) -> None:
    if (error := direction_error(attention)) is not None:
        raise AttentionKindError(error)


class SparsityConfig:
    """What all patterns share; derive from it for a pattern of your own, with a ``make_layout(seq_len)``.

    Args:
        num_heads: attention heads, one layout each.
        block: tokens along the side of a block.
        different_layout_per_head: heads may differ; otherwise all have the layout of the first.

    Raises:
        ValueError: an argument is out of range, or arguments contradict each other.
    """

    #: Source of random blocks. DeepSpeed's is Python's global generator; give it a ``random.Random`` of its own.
    generator: Any = random

    def __init__(self, num_heads: int, block: int = 16, different_layout_per_head: bool = False) -> None:
        _require(positive_error("num_heads", num_heads), positive_error("block", block))
        self.num_heads = num_heads
        self.block = block
        self.different_layout_per_head = different_layout_per_head
        self.num_layout_heads = num_heads if different_layout_per_head else 1

    def setup_layout(self, seq_len: int) -> Tensor:
        """Zeros, int64, ``[num_heads, seq_len / block, seq_len / block]``.

        Raises:
            ValueError: ``seq_len`` is not a multiple of ``block``.
        """
        blocks = self._blocks(seq_len)
        return torch.zeros(self.num_heads, blocks, blocks, dtype=torch.int64)

    def check_and_propagate_first_head_layout(self, layout: Tensor) -> Tensor:
        """Give every head the layout of the first one, unless heads may differ."""
        if not self.different_layout_per_head:
            layout[1:] = layout[0]
        return layout

    def _blocks(self, seq_len: int) -> int:
        if seq_len % self.block:
            raise ValueError(
                f"the sequence has {seq_len} tokens, which is not a multiple of the block of {self.block}: pad it "
                f"(SparseAttentionUtils.pad_to_block_size), to {-(-seq_len // self.block) * self.block}"
            )
        return seq_len // self.block


class PatternConfig(SparsityConfig):
    """A pattern that is drawn head by head: ``draw`` sets the cells of one."""

    #: Fewest blocks of a row that the pattern can be drawn in.
    fewest_blocks: int = 1

    def make_layout(self, seq_len: int) -> Tensor:
        """The layout of a sequence, int64 of 0 and 1, ``[num_heads, seq_len / block, seq_len / block]``.

        Raises:
            ValueError: ``seq_len`` is not a multiple of ``block``, or too short for the pattern.
        """
        layout = self.setup_layout(seq_len)
        layout[: self.num_layout_heads] = self.cells(layout.shape[1])
        return self.check_and_propagate_first_head_layout(layout)

    def cells(self, blocks: int) -> Tensor:
        """The layouts that differ, bool, ``[num_layout_heads, blocks, blocks]``."""
        layout = torch.zeros(self.num_layout_heads, blocks, blocks, dtype=torch.bool)
        for head in range(self.num_layout_heads):
            layout = self.draw(head, layout)
        return layout

    def draw(self, head: int, layout: Tensor) -> Tensor:
        """``layout`` with the pattern of one head in it."""
        raise TypeError(f"{type(self).__name__} draws nothing: derive from SparsityConfig for a pattern of your own")

    def _need(self, name: str, wanted: int, blocks: int) -> None:
        if blocks < wanted:
            raise ValueError(
                f"{name} is {wanted}, and the sequence has {blocks} blocks of {self.block} tokens: it needs at least "
                f"{wanted * self.block} tokens"
            )


class DenseSparsityConfig(PatternConfig):
    """Every block: ordinary attention, for comparison. Arguments as of ``SparsityConfig``."""

    def draw(self, head: int, layout: Tensor) -> Tensor:
        """Set all cells."""
        layout[head] = 1
        return layout


class FixedSparsityConfig(PatternConfig):
    """Windows of ``num_local_blocks``, of which the last ``num_global_blocks`` are seen from everywhere (Child et al.).

    Args:
        num_local_blocks: blocks of a window.
        num_global_blocks: blocks of each window that speak for it; divides ``num_local_blocks``.
        attention: "bidirectional", or "unidirectional": nothing above the diagonal of blocks.
        horizontal_global_attention: these blocks see everything, too.
        num_different_global_patterns: head ``h`` takes the blocks ``h % num_different_global_patterns`` steps before
            the last ones.
    """

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_local_blocks: int = 4,
        num_global_blocks: int = 1,
        attention: str = "bidirectional",
        horizontal_global_attention: bool = False,
        num_different_global_patterns: int = 1,
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        _require(
            positive_error("num_local_blocks", num_local_blocks),
            positive_error("num_global_blocks", num_global_blocks),
            positive_error("num_different_global_patterns", num_different_global_patterns),
        )
        _require_kind(attention)
        _require(
            windows_error(
                num_local_blocks, num_global_blocks, num_different_global_patterns, different_layout_per_head
            ),
            direction_error(attention, horizontal_global_attention),
        )
        self.num_local_blocks = num_local_blocks
        self.num_global_blocks = num_global_blocks
        self.attention = attention
        self.horizontal_global_attention = horizontal_global_attention
        self.num_different_global_patterns = num_different_global_patterns

    def set_local_layout(self, h: int, layout: Tensor) -> Tensor:
        """Windows of equal size from the start of the sequence."""
        return _windows(h, layout, [self.num_local_blocks], self.attention)

    def set_global_layout(self, h: int, layout: Tensor) -> Tensor:
        """The global blocks of each whole window; those of a shorter last one lie as far in, if there is room."""
        blocks, width = layout.shape[1], self.num_global_blocks
        offset = self.num_local_blocks - (1 + h % self.num_different_global_patterns) * width
        whole = blocks - blocks % self.num_local_blocks
        starts = list(range(offset, whole, self.num_local_blocks))
        if whole < blocks:
            starts.append(min(whole + offset, blocks - width))
        for start in starts:
            _stretch(h, layout, start, start + width, self.attention, self.horizontal_global_attention)
        return layout

    def draw(self, head: int, layout: Tensor) -> Tensor:
        """Local windows and global blocks."""
        return self.set_global_layout(head, self.set_local_layout(head, layout))


class VariableSparsityConfig(PatternConfig):
    """Windows of different sizes, global blocks by number, random blocks.

    Args:
        num_random_blocks: in each row; also ahead of the diagonal.
        local_window_blocks: blocks of each window from the start; the last size is repeated.
        global_block_indices, global_block_end_indices: blocks that all see; with ends, from each index up to its end.
        attention, horizontal_global_attention: as of ``FixedSparsityConfig``.
    """

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_random_blocks: int = 0,
        local_window_blocks: Sequence[int] = (4,),
        global_block_indices: Sequence[int] = (0,),
        global_block_end_indices: Sequence[int] | None = None,
        attention: str = "bidirectional",
        horizontal_global_attention: bool = False,
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        _require_kind(attention)
        _require(
            positive_error("num_random_blocks", num_random_blocks, least=0),
            local_windows_error(local_window_blocks),
            global_blocks_error(global_block_indices, global_block_end_indices),
            direction_error(attention, horizontal_global_attention),
        )
        self.num_random_blocks = self.fewest_blocks = num_random_blocks
        self.local_window_blocks = list(local_window_blocks)
        self.global_block_indices = list(global_block_indices)
        self.global_block_end_indices = None if global_block_end_indices is None else list(global_block_end_indices)
        self.attention = attention
        self.horizontal_global_attention = horizontal_global_attention

    def set_random_layout(self, h: int, layout: Tensor) -> Tensor:
        """``num_random_blocks`` different ones in each row."""
        self._need("num_random_blocks", self.num_random_blocks, layout.shape[1])
        return _random(h, layout, self.num_random_blocks, self.generator, ahead=True)

    def set_local_layout(self, h: int, layout: Tensor) -> Tensor:
        """The windows."""
        return _windows(h, layout, self.local_window_blocks, self.attention)

    def set_global_layout(self, h: int, layout: Tensor) -> Tensor:
        """The global blocks that lie in the sequence."""
        for start, end in _stretches(self, layout.shape[1]):
            _stretch(h, layout, start, end, self.attention, self.horizontal_global_attention)
        return layout

    def draw(self, head: int, layout: Tensor) -> Tensor:
        """Random blocks, windows, global blocks."""
        return self.set_global_layout(head, self.set_local_layout(head, self.set_random_layout(head, layout)))


class BigBirdSparsityConfig(PatternConfig):
    """Random blocks, a window that slides, and global blocks at the start (BigBird's ITC).

    Args:
        num_random_blocks: in each row; with "unidirectional" up to the diagonal.
        num_sliding_window_blocks: odd; half of them, rounded down, on either side of the diagonal.
        num_global_blocks: the first blocks, which see all and are seen by all.
        attention: "bidirectional", or "unidirectional": nothing above the diagonal of blocks.
    """

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_random_blocks: int = 1,
        num_sliding_window_blocks: int = 3,
        num_global_blocks: int = 1,
        attention: str = "bidirectional",
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        _require_kind(attention)
        _require(
            positive_error("num_random_blocks", num_random_blocks, least=0),
            positive_error("num_sliding_window_blocks", num_sliding_window_blocks),
            positive_error("num_global_blocks", num_global_blocks, least=0),
        )
        self.num_random_blocks = num_random_blocks
        self.num_sliding_window_blocks = num_sliding_window_blocks
        self.num_global_blocks = num_global_blocks
        self.fewest_blocks = max(num_random_blocks, num_sliding_window_blocks, num_global_blocks)
        self.attention = attention

    def set_random_layout(self, h: int, layout: Tensor) -> Tensor:
        """``num_random_blocks`` different ones in each row, or as many as there are up to the diagonal."""
        self._need("num_random_blocks", self.num_random_blocks, layout.shape[1])
        ahead = self.attention == "bidirectional"
        return _random(h, layout, self.num_random_blocks, self.generator, ahead=ahead)

    def set_sliding_window_layout(self, h: int, layout: Tensor) -> Tensor:
        """The window around the diagonal."""
        self._need("num_sliding_window_blocks", self.num_sliding_window_blocks, layout.shape[1])
        return _band(h, layout, self.num_sliding_window_blocks)

    def set_global_layout_itc(self, h: int, layout: Tensor) -> Tensor:
        """The first rows and columns; with "unidirectional" nothing above the diagonal remains of the whole layout."""
        self._need("num_global_blocks", self.num_global_blocks, layout.shape[1])
        _stretch(h, layout, 0, self.num_global_blocks, "bidirectional", True)
        return torch.tril(layout) if self.attention == "unidirectional" else layout

    def draw(self, head: int, layout: Tensor) -> Tensor:
        """Random blocks, window, global blocks."""
        return self.set_global_layout_itc(
            head, self.set_sliding_window_layout(head, self.set_random_layout(head, layout))
        )


class BSLongformerSparsityConfig(PatternConfig):
    """A window that slides, and global blocks by number that see all and are seen by all (Longformer, in blocks).

    Args:
        num_sliding_window_blocks: odd; half of them, rounded down, on either side of the diagonal.
        global_block_indices, global_block_end_indices: as of ``VariableSparsityConfig``.
        attention: as of ``BigBirdSparsityConfig``.
    """

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_sliding_window_blocks: int = 3,
        global_block_indices: Sequence[int] = (0,),
        global_block_end_indices: Sequence[int] | None = None,
        attention: str = "bidirectional",
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        _require_kind(attention)
        _require(
            positive_error("num_sliding_window_blocks", num_sliding_window_blocks),
            global_blocks_error(global_block_indices, global_block_end_indices),
        )
        self.num_sliding_window_blocks = self.fewest_blocks = num_sliding_window_blocks
        self.global_block_indices = list(global_block_indices)
        self.global_block_end_indices = None if global_block_end_indices is None else list(global_block_end_indices)
        self.attention = attention

    def set_sliding_window_layout(self, h: int, layout: Tensor) -> Tensor:
        """The window around the diagonal."""
        self._need("num_sliding_window_blocks", self.num_sliding_window_blocks, layout.shape[1])
        return _band(h, layout, self.num_sliding_window_blocks)

    def set_global_layout(self, h: int, layout: Tensor) -> Tensor:
        """Rows and columns of the global blocks; with "unidirectional" nothing above the diagonal remains."""
        for start, end in _stretches(self, layout.shape[1]):
            _stretch(h, layout, start, end, "bidirectional", True)
        return torch.tril(layout) if self.attention == "unidirectional" else layout

    def draw(self, head: int, layout: Tensor) -> Tensor:
        """Window and global blocks."""
        return self.set_global_layout(head, self.set_sliding_window_layout(head, layout))


class LocalSlidingWindowSparsityConfig(PatternConfig):
    """A window that slides and nothing else, the same for all heads.

    Args:
        num_sliding_window_blocks: odd; half of them, rounded down, before the diagonal; with "bidirectional" as many
            after it.
        attention: "unidirectional" or "bidirectional".
    """

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        num_sliding_window_blocks: int = 3,
        attention: str = "unidirectional",
    ) -> None:
        super().__init__(num_heads, block)
        _require_kind(attention)
        _require(positive_error("num_sliding_window_blocks", num_sliding_window_blocks))
        self.num_sliding_window_blocks = self.fewest_blocks = num_sliding_window_blocks
        self.attention = attention

    def set_sliding_window_layout(self, h: int, layout: Tensor) -> Tensor:
        """The window at the diagonal."""
        self._need("num_sliding_window_blocks", self.num_sliding_window_blocks, layout.shape[1])
        return _band(h, layout, self.num_sliding_window_blocks, ahead=self.attention == "bidirectional")

    def draw(self, head: int, layout: Tensor) -> Tensor:
        """The window."""
        return self.set_sliding_window_layout(head, layout)


# -- strokes: each sets cells of one head, in place ---------------------------------------------------------------


def _windows(head: int, layout: Tensor, sizes: Sequence[int], attention: str) -> Tensor:
    """Blocks that see their own window; windows of ``sizes`` follow one another, the last size to the end."""
    blocks = layout.shape[1]
    first, repeated = list(sizes[:-1]), sizes[-1]
    rest = max(0, blocks - sum(first))
    lengths = torch.tensor([*first, *[repeated] * -(-rest // repeated)])
    window = torch.repeat_interleave(torch.arange(len(lengths)), lengths)[:blocks]
    seen = window[:, None] == window[None, :]
    if attention == "unidirectional":
        seen = seen.tril()
    layout[head][seen.to(layout.device)] = 1
    return layout


def _band(head: int, layout: Tensor, width: int, *, ahead: bool = True) -> Tensor:
    position = torch.arange(layout.shape[1], device=layout.device)
    distance = position[:, None] - position[None, :]
    half = width // 2
    layout[head][(distance <= half) & (distance >= (-half if ahead else 0))] = 1
    return layout


def _stretch(head: int, layout: Tensor, start: int, end: int, attention: str, rows: bool) -> None:
    """Columns ``start`` to ``end`` for all, or from their own rows on; ``rows``: the same stretch of rows."""
    layout[head, 0 if attention == "bidirectional" else start :, start:end] = 1
    if rows:
        layout[head, start:end, :] = 1


def _stretches(config: VariableSparsityConfig | BSLongformerSparsityConfig, blocks: int) -> list[tuple[int, int]]:
    starts = config.global_block_indices
    ends = [start + 1 for start in starts] if (given := config.global_block_end_indices) is None else given
    return [(start, min(end, blocks)) for start, end in zip(starts, ends, strict=True) if start < blocks]


def _random(head: int, layout: Tensor, count: int, generator: Any, *, ahead: bool) -> Tensor:
    """The draws of DeepSpeed, one sample a row, so that a seed gives its layout."""
    blocks = layout.shape[1]
    for row in range(blocks):
        among = blocks if ahead else row + 1
        layout[head, row, generator.sample(range(among), min(count, among))] = 1
    return layout
