"""``deepspeed.runtime.sparse_tensor``."""

from __future__ import annotations

from ds_hf.deepspeed_api.sparse_tensor import SparseTensor

from .._missing import missing

__all__ = ["SparseTensor"]
__getattr__ = missing(__name__)
