"""Attention that computes the scores of a layout only: flex_attention on GPUs, masked attention elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ds_hf.engine.modules.sparse.block_layout import BlockLayout
from ds_hf.engine.modules.sparse.tiled import fits, tensor_of, tiled_attention

__all__ = ["attention"]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: BlockLayout | None,
    *,
    keep: Sequence[Any] = (),
    bias: Sequence[Tensor] = (),
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    starts: tuple[Any, int] | None = None,
) -> Tensor:
    """softmax(scale * query key^T + bias) value over the scores that layout, ``keep`` and ``causal`` all allow.

    On a GPU nothing of size tokens x tokens is allocated. On the CPU flex_attention has no backward; the layout
    becomes a mask there. A query without any score gets zeros.

    Args:
        query: ``[batch, heads, queries, head_dim]``, fp32, bf16 or fp16 (on the CPU also fp64).
        key, value: ``[batch, kv_heads, keys, head_dim]``; ``kv_heads`` divides ``heads``.
        layout: None: all scores.
        keep: masks of scores to compute: bool ``[batch or 1, heads or 1, queries or 1, keys]``, or BlockMasks.
        bias: added to the scores, same shapes, any float dtype; with a gradient where one is needed.
        causal: key <= query; for as many keys as queries.
        scale: default ``head_dim ** -0.5``.
        dropout: probability with which a weight is dropped; on the CPU.
        starts: positions of the first query and the first key in the sequence; default: both end together.

    Raises:
        ValueError: a dtype, a shape, or dropout on a GPU.
    """
    _check(query, key, layout, causal)
    if fits(query, key):
        if dropout:
            raise ValueError(
                "sparse attention on a GPU has no dropout of attention weights: set the model's attention dropout "
                "(attention_dropout, attention_probs_dropout_prob, attn_pdrop) to 0"
            )
        return tiled_attention(query, key, value, layout, keep, bias, causal, scale)
    mask = _mask(query, key, layout, keep, bias, causal, starts)
    gqa = query.shape[1] != key.shape[1]
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale, enable_gqa=gqa
    )


def _check(query: Tensor, key: Tensor, layout: BlockLayout | None, causal: bool) -> None:
    if not query.is_floating_point() or query.element_size() < 2:
        raise ValueError(f"attention computes in fp32, bf16 or fp16, and query is {query.dtype}")
    if layout is not None and layout.heads not in (1, query.shape[1]):
        raise ValueError(
            f"the layout has {layout.heads} heads and query {query.shape[1]}: make it for as many, or with "
            "different_layout_per_head=False"
        )
    if causal and query.shape[2] != key.shape[2]:
        raise ValueError(f"causal needs as many keys as queries, not {key.shape[2]} and {query.shape[2]}")


def _mask(
    query: Tensor,
    key: Tensor,
    layout: BlockLayout | None,
    keep: Sequence[Any],
    bias: Sequence[Tensor],
    causal: bool,
    starts: tuple[Any, int] | None,
) -> Tensor | None:
    """One mask for all of it: bool, or with a bias its values and -inf."""
    queries, keys = query.shape[2], key.shape[2]
    masks = [mask if isinstance(mask, Tensor) else tensor_of(mask, query.device) for mask in keep]
    if layout is not None:
        start, key_start = (keys - queries, 0) if starts is None else starts
        masks.append(layout.mask(queries, keys, query.device, start=start, key_start=key_start)[None])
    if causal:
        masks.append(torch.ones(1, 1, queries, keys, dtype=torch.bool, device=query.device).tril())
    allowed = functools.reduce(torch.logical_and, masks) if masks else None
    if not bias:
        return allowed
    added = functools.reduce(torch.add, [part.to(query.dtype) for part in bias])
    return added if allowed is None else added.masked_fill(~allowed, float("-inf"))
