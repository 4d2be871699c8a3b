"""``deepspeed.ops.sparse_attention.matmul``."""

from __future__ import annotations

from ds_hf.deepspeed_api.sparse_blocks import MatMul

from ..._missing import missing

__all__ = ["MatMul"]
__getattr__ = missing(__name__)
