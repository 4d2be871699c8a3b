"""Attention over tiles, by torch's flex_attention: what a layout, a mask and causality leave out is never computed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_hf.engine.modules.sparse.block_layout import TILE, BlockLayout, Tiles

__all__ = ["block_mask_of", "fits", "tensor_of", "tiled_attention"]

Mod = Callable[..., Any]


def fits(query: Tensor, key: Tensor) -> bool:
    """Whether the kernels take these tensors: on a GPU, whole sequences of at least a tile, heads of at least 16."""
    return (
        query.device.type == "cuda"
        and query.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and query.shape[2] == key.shape[2] >= TILE
        and query.shape[3] >= 16
    )


def tiled_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: BlockLayout | None,
    keep: Sequence[Any],
    bias: Sequence[Tensor],
    causal: bool,
    scale: float | None,
) -> Tensor:
    """As ``attention``, on tensors that ``fits`` agrees to. A graph that is being compiled breaks here."""
    return _outside_graphs()(query, key, value, layout, keep, bias, causal, scale)  # type: ignore[no-any-return]


@functools.cache
def _outside_graphs() -> Callable[..., Any]:
    """``torch.compiler`` takes a second to import: not before it is needed."""
    disable: Callable[..., Any] = torch.compiler.disable
    return disable(_tiled_attention)  # type: ignore[no-any-return]


def _tiled_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: BlockLayout | None,
    keep: Sequence[Any],
    bias: Sequence[Tensor],
    causal: bool,
    scale: float | None,
) -> Tensor:
    block_mask = block_mask_of(query.shape[2], query.device, layout, keep, causal)
    return _compiled()(  # type: ignore[no-any-return]
        query,
        key,
        value,
        score_mod=_add(bias) if bias else None,
        block_mask=block_mask,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        # Loading a tile of the bias ahead of its use, as loops over keys do by default, overflows shared memory.
        kernel_options={"num_stages": 1} if bias else None,
    )


@functools.cache
def _compiled() -> Any:
    """The kernel. ``fullgraph``: when dynamo gives up it says so, and never falls back to all scores at once."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, fullgraph=True)


# -- masks of tiles -----------------------------------------------------------------------------------------------


def block_mask_of(
    length: int, device: torch.device, layout: BlockLayout | None, keep: Sequence[Any], causal: bool
) -> Any:
    """A BlockMask of all conditions; None without any.

    Making one takes some fifty small kernels, as long as attention over 10,000 tokens: it is kept with the mask, which
    transformers makes once for all layers, or else with the layout.
    """
    if not keep and layout is not None:
        return layout.keep(("tiled", length, device, causal), lambda: _build(length, device, layout, keep, causal))
    if len(keep) != 1:
        return _build(length, device, layout, keep, causal)
    (mask,) = keep
    if not isinstance(mask, Tensor) and layout is None and not causal:
        return mask
    made = mask.__dict__.setdefault("_ds_hf_with_layouts", {})
    key = (id(layout), causal, length, mask._version if isinstance(mask, Tensor) else None)
    if key not in made:
        made[key] = (layout, _build(length, device, layout, keep, causal))  # the layout keeps its id
    return made[key][1]


def tensor_of(mask: Any, device: torch.device) -> Tensor:
    """What a BlockMask says of each score, bool ``[batch or 1, heads or 1, queries, keys]``."""
    from torch.nn.attention.flex_attention import create_mask

    batch, heads = mask.kv_num_blocks.shape[:2]
    queries, keys = mask.seq_lengths
    return create_mask(mask.mask_mod, batch, heads, queries, keys, device=str(device))


def _build(length: int, device: torch.device, layout: BlockLayout | None, keep: Sequence[Any], causal: bool) -> Any:
    from torch.nn.attention.flex_attention import BlockMask, and_masks

    parts: list[tuple[Tiles, Mod]] = []
    if layout is not None:
        parts.append((layout.tiles(length, device), _in_layout(layout.on(device), layout.block)))
    if causal:
        parts.append((_causal_tiles(length, device), _causal))
    for mask in keep:
        if isinstance(mask, Tensor):
            parts.append((_tiles_of_tensor(mask, length), _lookup(mask)))
        else:
            parts.append((_tiles_of_block_mask(mask), mask.mask_mod))
    if not parts:
        return None
    tiles = functools.reduce(Tiles.both, (tiles for tiles, _ in parts))
    every = tiles.every.clone()
    if length % TILE:  # what lies behind the end is masked in partial tiles only
        every[..., -1, :] = every[..., -1] = False
    partial_num, partial = _ordered(tiles.some & ~every)
    full_num, full = _ordered(every)
    return BlockMask.from_kv_blocks(
        partial_num,
        partial,
        full_num,
        full,
        BLOCK_SIZE=TILE,
        mask_mod=and_masks(*(mod for _, mod in parts)) if len(parts) > 1 else parts[0][1],
        seq_lengths=(length, length),
    )


def _ordered(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """For each row of tiles, how many there are, and their numbers before all others."""
    number = tiles.sum(-1, dtype=torch.int32)
    order = torch.argsort(tiles.to(torch.int8), dim=-1, descending=True, stable=True).to(torch.int32)
    return number.contiguous(), order.contiguous()


def _causal_tiles(length: int, device: torch.device) -> Tiles:
    number = torch.arange(-(-length // TILE), device=device)
    rows, columns = number[:, None], number[None, :]
    return Tiles((columns <= rows)[None, None], (columns < rows)[None, None])


def _tiles_of_tensor(keep: Tensor, length: int) -> Tiles:
    """Tiles of a bool mask ``[batch or 1, heads or 1, queries or 1, keys]``."""
    ragged = -length % TILE
    whole_rows = keep.shape[2] == 1
    padded = torch.nn.functional.pad(keep, (0, ragged, 0, 0 if whole_rows else ragged))
    side = 1 if whole_rows else TILE
    shape = (*keep.shape[:2], padded.shape[2] // side, side, padded.shape[3] // TILE, TILE)
    tiled = padded.reshape(shape).transpose(3, 4).flatten(4)
    rows = -(-length // TILE)
    return Tiles(*(part.expand(-1, -1, rows, -1) if whole_rows else part for part in (tiled.any(-1), tiled.all(-1))))


def _tiles_of_block_mask(mask: Any) -> Tiles:
    if mask.BLOCK_SIZE != (TILE, TILE):
        raise ValueError(f"a BlockMask of tiles of {TILE} x {TILE} is needed, and this one has {mask.BLOCK_SIZE}")
    partial = _dense(mask.kv_num_blocks, mask.kv_indices)
    full = torch.zeros_like(partial)
    if mask.full_kv_num_blocks is not None:
        full = _dense(mask.full_kv_num_blocks, mask.full_kv_indices)
    return Tiles(partial | full, full)


def _dense(number: Tensor, order: Tensor) -> Tensor:
    """The inverse of ``_ordered``."""
    listed = torch.arange(order.shape[-1], device=order.device) < number[..., None]
    return torch.zeros_like(listed).scatter_(-1, order.long(), listed)


# -- functions of one score: batch, head, query, key --------------------------------------------------------------


def _causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def _in_layout(cells: Tensor, block: int) -> Mod:
    if cells.shape[0] == 1:
        shared = cells[0]

        def in_shared(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return shared[query // block, key // block]

        return in_shared

    def in_layout(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return cells[head, query // block, key // block]

    return in_layout


def _lookup(table: Tensor) -> Mod:
    """The element of ``table`` at a position; dims of size 1 are left out, and their gradient stays small, too."""
    by_batch, by_head, by_query = (size > 1 for size in table.shape[:3])
    table = table.reshape([size for dim, size in enumerate(table.shape) if size > 1 or dim == 3])

    def lookup(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if by_batch and by_head:
            return table[batch, head, query, key] if by_query else table[batch, head, key]
        if by_batch:
            return table[batch, query, key] if by_query else table[batch, key]
        if by_head:
            return table[head, query, key] if by_query else table[head, key]
        return table[query, key] if by_query else table[key]

    return lookup


def _add(bias: Sequence[Tensor]) -> Mod:
    values = [_lookup(part) for part in bias]

    def add(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        for value in values:
            score = score + value(batch, head, query, key)
        return score

    return add
