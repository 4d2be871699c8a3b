"""``deepspeed.ops.sparse_attention.softmax``."""

from __future__ import annotations

from ..._missing import missing
from .matmul import Softmax

__all__ = ["Softmax"]
__getattr__ = missing(__name__)
