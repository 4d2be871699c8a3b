"""Attention over a layout, for models that build their own (``deepspeed.ops.sparse_attention``).

DeepSpeed's computed in fp16 on GPUs with triton 1.0, and is gone from its releases since 2026. These take fp32, bf16
and fp16, on GPUs and CPUs, and give gradients to relative position embeddings. A query that may see nothing gets
zeros, where DeepSpeed's softmax gave NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hf.engine.modules.sparse.attention import attention
from ds_hf.engine.modules.sparse.block_layout import BlockLayout
from ds_hf.engine.modules.sparse.layouts import SparsityConfig

__all__ = ["SparseSelfAttention"]

_MODES = ("add", "mul")


class SparseSelfAttention(nn.Module):
    """Scaled dot-product attention of a sequence with itself, over the blocks of a pattern.

    Args:
        sparsity_config: the pattern, for the number of heads that ``forward`` gets.
        key_padding_mask_mode, attn_mask_mode: "add": the mask is added to the scores. "mul": scores where it is 0 are
            left out.
        max_seq_length: longest sequence; the layout is made for it once, and shorter sequences take a corner of it.

    The layout is the buffer ``master_layout``, as in DeepSpeed; before the first use rank 0 broadcasts it, since its
    random blocks differ from process to process.
    """

    def __init__(
        self,
        sparsity_config: SparsityConfig | None = None,
        key_padding_mask_mode: str = "add",
        attn_mask_mode: str = "mul",
        max_seq_length: int = 2048,
    ) -> None:
        super().__init__()
        config = SparsityConfig(num_heads=4) if sparsity_config is None else sparsity_config
        make_layout: Callable[[int], Tensor] | None = getattr(config, "make_layout", None)
        if make_layout is None:
            raise TypeError(
                f"{type(config).__name__} has no pattern: give FixedSparsityConfig(num_heads=...) or another one with "
                "make_layout(seq_len)"
            )
        for name, mode in (("key_padding_mask_mode", key_padding_mask_mode), ("attn_mask_mode", attn_mask_mode)):
            if mode not in _MODES:
                raise ValueError(f'{name} is "add" or "mul", not {mode!r}')
        self.sparsity_config = config
        self.key_padding_mask_mode, self.attn_mask_mode = key_padding_mask_mode, attn_mask_mode
        self.register_buffer("master_layout", make_layout(max_seq_length))
        self.master_layout: Tensor
        self._need_layout_synchronization = True
        self._ready: tuple[Any, dict[int, BlockLayout]] = (None, {})

    def get_layout(self, L: int) -> Tensor:
        """The layout of ``L`` tokens, int64 ``[heads, L / block, L / block]``, on the CPU. The first is collective.

        Raises:
            ValueError: ``L`` is not a multiple of the block, or more than ``max_seq_length``.
        """
        if self._need_layout_synchronization and dist.is_initialized():
            dist.broadcast(self.master_layout, src=0)
            self._need_layout_synchronization = False
        return self._corner(L).cpu()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rpe: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        """softmax(query key^T / sqrt(head_dim) + rpe + masks) value, ``[batch, heads, tokens, head_dim]``.

        Args:
            query, key, value: ``[batch, heads, tokens, head_dim]``; ``key`` may have its last two dims exchanged.
            rpe: relative position embedding, added to the scores: ``[batch or 1, heads or 1, tokens, tokens]``.
            key_padding_mask: ``[batch, tokens]``, also with dims of size 1 between or after.
            attn_mask: ``[tokens, tokens]``, also with dims of size 1 before.

        Raises:
            ValueError: a shape or dtype, or a number of tokens that the layout does not have.
        """
        batch, heads, tokens, _ = query.shape
        if key.shape[2] != tokens:
            key = key.transpose(2, 3)
        if query.shape != key.shape or key.shape != value.shape:
            raise _OtherAttentionError(
                f"sparse attention is of a sequence with itself: query, key and value have the shapes "
                f"{tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}"
            )
        if heads != self.sparsity_config.num_heads:
            raise ValueError(
                f"query has {heads} heads, and the pattern was made for {self.sparsity_config.num_heads}: give "
                f"sparsity_config with num_heads={heads}"
            )
        masks = [
            (_shaped("key_padding_mask", key_padding_mask, (batch, 1, 1, tokens)), self.key_padding_mask_mode),
            (_shaped("attn_mask", attn_mask, (1, 1, tokens, tokens)), self.attn_mask_mode),
        ]
        if rpe is not None:
            _check_rpe(rpe, (batch, heads, tokens, tokens))
        keep = [mask != 0 for mask, mode in masks if mask is not None and mode == "mul"]
        bias = [_added(mask) for mask, mode in masks if mask is not None and mode == "add"]
        return attention(query, key, value, self._layout(tokens), keep=keep, bias=bias if rpe is None else [rpe, *bias])

    def _corner(self, tokens: int) -> Tensor:
        block, blocks = self.sparsity_config.block, self.master_layout.shape[-1]
        if tokens % block:
            raise ValueError(
                f"the sequence has {tokens} tokens, which is not a multiple of the block of {block}: pad it "
                f"(SparseAttentionUtils.pad_to_block_size), to {-(-tokens // block) * block}"
            )
        if tokens > blocks * block:
            raise ValueError(f"{tokens} tokens, and the layout is for {blocks * block}: give max_seq_length={tokens}")
        return self.master_layout[..., : tokens // block, : tokens // block]

    def _layout(self, tokens: int) -> BlockLayout:
        """Ready to use; made anew when the buffer changed (loading, moving)."""
        if self._need_layout_synchronization and dist.is_initialized():
            self.get_layout(self.sparsity_config.block)
        version = (self.master_layout.data_ptr(), self.master_layout._version, self.master_layout.device)
        if self._ready[0] != version:
            self._ready = (version, {})
        made = self._ready[1]
        if tokens not in made:
            cells = self._corner(tokens) != 0
            alike = bool((cells == cells[:1]).all())
            made[tokens] = BlockLayout(cells[:1] if alike else cells, self.sparsity_config.block)
        return made[tokens]


class _OtherAttentionError(ValueError, NotImplementedError):
    """Attention to another sequence: a wrong argument, for which DeepSpeed raises the latter."""


def _shaped(name: str, mask: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    """``mask`` with four dims; those of size 1 may stand anywhere or be missing."""
    if mask is None:
        return None
    wanted = [size for size in shape if size != 1]
    if [size for size in mask.shape if size != 1] != wanted:
        expected = [shape[0], shape[3]] if name == "key_padding_mask" else list(shape[2:])
        raise ValueError(f"{name} has the shape {list(mask.shape)}, and {expected} is expected")
    return mask.reshape(shape)


def _added(mask: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        raise ValueError(
            'a bool mask cannot be added to scores: give mode "mul", or a mask of 0 and large negative numbers'
        )
    return mask if mask.is_floating_point() else mask.float()


def _check_rpe(rpe: Tensor, shape: tuple[int, ...]) -> None:
    fits = rpe.dim() == 4 and all(have in (1, want) for have, want in zip(rpe.shape, shape, strict=True))
    if not fits or rpe.shape[3] != shape[3] or not rpe.is_floating_point():
        raise ValueError(f"rpe is {rpe.dtype} {list(rpe.shape)}, and floating-point numbers {list(shape)} are expected")
