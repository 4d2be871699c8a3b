"""``deepspeed.ops.sparse_attention.softmax``."""

from __future__ import annotations

from ds_hf.deepspeed_api.sparse_blocks import Softmax

from ..._missing import missing

__all__ = ["Softmax"]
__getattr__ = missing(__name__)
