"""``deepspeed.ops.sparse_attention.sparse_self_attention``."""

from __future__ import annotations

from ds_hf.deepspeed_api.sparse_attention import SparseSelfAttention

from ..._missing import missing

__all__ = ["SparseSelfAttention"]
__getattr__ = missing(__name__)
