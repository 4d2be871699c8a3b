"""``deepspeed.ops.sparse_attention.softmax``."""

from .matmul import Softmax

__all__ = ["Softmax"]
