"""From the section ``sparse_attention`` of a file to a pattern."""

from __future__ import annotations

import random
from typing import Any

from ds_hf.config.types.training import SparseAttentionSection
from ds_hf.engine.modules.sparse.block_layout import BlockLayout
from ds_hf.engine.modules.sparse.layouts import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    PatternConfig,
    VariableSparsityConfig,
)

__all__ = ["KEYS", "Patterns", "make_pattern"]

_WINDOWS = ("attention", "horizontal_global_attention")
_GLOBALS = ("global_block_indices", "global_block_end_indices")

#: The keys of the section that each mode reads, beside ``mode`` and ``block``.
KEYS: dict[str, tuple[str, ...]] = {
    "dense": (),
    "fixed": (
        "different_layout_per_head",
        "num_local_blocks",
        "num_global_blocks",
        *_WINDOWS,
        "num_different_global_patterns",
    ),
    "variable": ("different_layout_per_head", "num_random_blocks", "local_window_blocks", *_GLOBALS, *_WINDOWS),
    "bigbird": (
        "different_layout_per_head",
        "num_random_blocks",
        "num_sliding_window_blocks",
        "num_global_blocks",
        "attention",
    ),
    "bslongformer": ("different_layout_per_head", "num_sliding_window_blocks", *_GLOBALS, "attention"),
    "local_sliding_window": ("num_sliding_window_blocks", "attention"),
}

_CLASSES: dict[str, type[PatternConfig]] = {
    "dense": DenseSparsityConfig,
    "fixed": FixedSparsityConfig,
    "variable": VariableSparsityConfig,
    "bigbird": BigBirdSparsityConfig,
    "bslongformer": BSLongformerSparsityConfig,
    "local_sliding_window": LocalSlidingWindowSparsityConfig,
}


def make_pattern(section: SparseAttentionSection, num_heads: int) -> PatternConfig:
    """The pattern that ``section`` asks for.

    Raises:
        ValueError: its values contradict each other.
    """
    chosen: dict[str, Any] = {key: getattr(section, key) for key in KEYS[section.mode]}
    return _CLASSES[section.mode](num_heads, block=section.block, **chosen)


class Patterns:
    """The layouts of one model, for any length and layer.

    Random blocks are drawn for each layer anew, from a generator with the layer as its seed: the same on every process,
    after a restart, and in evaluation.
    """

    def __init__(self, section: SparseAttentionSection, num_heads: int) -> None:
        self.section, self.num_heads = section, num_heads
        self.config = make_pattern(section, num_heads)
        self.random = bool(getattr(self.config, "num_random_blocks", 0))
        self._layouts: dict[tuple[int, int, int, int], BlockLayout] = {}

    def layout(self, tokens: int, layer: int, first: int = 0, heads: int | None = None) -> BlockLayout:
        """The layout of ``layer`` for a sequence of ``tokens``, which may end within a block; of ``heads`` from
        ``first`` on (default: of all)."""
        blocks = -(-tokens // self.config.block)
        key = (blocks, layer if self.random else 0, first, self.num_heads if heads is None else heads)
        if key not in self._layouts:
            recent = {blocks, *sorted({known for known, *_ in self._layouts}, reverse=True)[:2]}
            self._layouts = {known: made for known, made in self._layouts.items() if known[0] in recent}
            config = make_pattern(self.section, self.num_heads)
            config.generator = random.Random(key[1])
            cells = config.cells(max(blocks, config.fewest_blocks))[:, :blocks, :blocks]
            if len(cells) > 1:
                cells = cells[first : first + key[3]]
            self._layouts[key] = BlockLayout(cells, config.block)
        return self._layouts[key]
