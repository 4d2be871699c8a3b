"""``deepspeed.ops.op_builder.all_ops``."""

from __future__ import annotations

from ds_hf.deepspeed_api.op_builder import BUILDERS

from ..._missing import missing

__all__ = ["ALL_OPS"]

ALL_OPS = {builder.NAME: builder() for builder in BUILDERS.values()}
__getattr__ = missing(__name__)
