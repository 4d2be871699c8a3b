"""``deepspeed.ops.sparse_attention.sparse_attention_utils``."""

from __future__ import annotations

from ds_hf.deepspeed_api.sparse_attention_utils import SparseAttentionUtils

from ..._missing import missing

__all__ = ["SparseAttentionUtils"]
__getattr__ = missing(__name__)
