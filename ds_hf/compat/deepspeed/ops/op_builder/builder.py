"""``deepspeed.ops.op_builder.builder``."""

from __future__ import annotations

from ds_hf.deepspeed_api.op_builder import OpBuilder

from ..._missing import missing

__all__ = ["OpBuilder"]
__getattr__ = missing(__name__)
