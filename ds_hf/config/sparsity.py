"""What makes a pattern of block-sparse attention impossible, as sentences.

The section ``sparse_attention`` of a file and the constructors of ``ds_hf.engine.modules.sparse.layouts`` ask the same
functions. Each returns ``None``, or what is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["KINDS", "direction_error", "global_blocks_error", "local_windows_error", "positive_error", "windows_error"]

KINDS = ("unidirectional", "bidirectional")


def positive_error(name: str, value: object, *, least: int = 1) -> str | None:
    """``value`` has to be an integer of at least ``least``."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= least:
        return None
    return f"{name} has to be an integer of at least {least}, not {value!r}"


def direction_error(attention: object, horizontal: bool = False) -> str | None:
    """``attention``, and the global rows that only one kind of it can have."""
    if attention not in KINDS:
        return f'attention has to be "unidirectional" or "bidirectional", not {attention!r}'
    if horizontal and attention != "bidirectional":
        return 'horizontal_global_attention looks ahead, so it needs attention "bidirectional"'
    return None


def windows_error(local: int, global_: int, patterns: int, per_head: bool) -> str | None:
    """Windows of ``local`` blocks of which ``global_`` are seen from everywhere, in ``patterns`` variants."""
    if local % global_:
        return f"num_local_blocks {local} has to be a multiple of num_global_blocks {global_}"
    if patterns > 1 and not per_head:
        return f"num_different_global_patterns {patterns} needs different_layout_per_head"
    if patterns > local // global_:
        return (
            f"num_different_global_patterns is {patterns}, and windows of {local} blocks with {global_} global ones "
            f"have {local // global_} different patterns"
        )
    return None


def local_windows_error(windows: Sequence[int]) -> str | None:
    """``local_window_blocks``; the last one is repeated to the end of the sequence."""
    if not windows or any(positive_error("", size) for size in windows):
        return f"local_window_blocks takes one positive number of blocks for each window, not {list(windows)}"
    return None


def global_blocks_error(starts: Sequence[int], ends: Sequence[int] | None) -> str | None:
    """Global blocks ``starts``, or stretches of them from ``starts`` up to ``ends``, exclusive."""
    if any(positive_error("", index, least=0) for index in starts):
        return f"global_block_indices counts blocks from 0: {list(starts)}"
    if ends is None:
        return None
    if len(starts) != len(ends):
        return f"global_block_indices has {len(starts)} elements and global_block_end_indices {len(ends)}"
    for start, end in zip(starts, ends, strict=True):
        if start >= end:
            return f"the global blocks from {start} to {end} (exclusive) are none: each end lies after its start"
    return None
