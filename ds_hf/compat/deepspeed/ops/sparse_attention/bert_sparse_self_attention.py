"""``deepspeed.ops.sparse_attention.bert_sparse_self_attention``."""

from __future__ import annotations

from ds_hf.deepspeed_api.sparse_attention import BertSparseSelfAttention

from ..._missing import missing

__all__ = ["BertSparseSelfAttention"]
__getattr__ = missing(__name__)
