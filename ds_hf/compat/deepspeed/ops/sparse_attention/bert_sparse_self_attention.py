"""``deepspeed.ops.sparse_attention.bert_sparse_self_attention``."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ds_hf.engine.modules.sparse.layouts import FixedSparsityConfig, SparsityConfig

from .sparse_self_attention import SparseSelfAttention

__all__ = ["BertSparseSelfAttention"]


class BertSparseSelfAttention(nn.Module):
    """BERT's self-attention with a pattern: projections and ``SparseSelfAttention``.

    Args:
        config: has ``hidden_size`` and ``num_attention_heads``.
        sparsity_config: default ``FixedSparsityConfig`` for the heads of ``config``.
        max_seq_length: as of ``SparseSelfAttention``.

    Raises:
        ValueError: the heads do not divide the hidden size.
    """

    def __init__(
        self, config: Any, sparsity_config: SparsityConfig | None = None, *, max_seq_length: int = 2048
    ) -> None:
        super().__init__()
        heads = config.num_attention_heads
        if config.hidden_size % heads:
            raise ValueError(f"hidden_size {config.hidden_size} has to be a multiple of num_attention_heads {heads}")
        self.num_attention_heads = heads
        self.attention_head_size = config.hidden_size // heads
        self.all_head_size = config.hidden_size
        self.query = nn.Linear(config.hidden_size, self.all_head_size)
        self.key = nn.Linear(config.hidden_size, self.all_head_size)
        self.value = nn.Linear(config.hidden_size, self.all_head_size)
        pattern = FixedSparsityConfig(num_heads=heads) if sparsity_config is None else sparsity_config
        self.sparse_self_attention = SparseSelfAttention(pattern, max_seq_length=max_seq_length)

    def transpose_for_scores(self, x: Tensor) -> Tensor:
        """``[batch, tokens, hidden]`` to ``[batch, heads, tokens, head_dim]``."""
        return x.view(*x.shape[:-1], self.num_attention_heads, self.attention_head_size).transpose(1, 2)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Context of each token, ``[batch, tokens, hidden]``.

        Args:
            hidden_states: ``[batch, tokens, hidden]``.
            attention_mask: added to the scores of the keys: ``[batch, tokens]`` or ``[batch, 1, 1, tokens]``.
        """
        projections = (self.query, self.key, self.value)
        query, key, value = (self.transpose_for_scores(projection(hidden_states)) for projection in projections)
        context: Tensor = self.sparse_self_attention(query, key, value, key_padding_mask=attention_mask)
        return context.transpose(1, 2).flatten(2)
