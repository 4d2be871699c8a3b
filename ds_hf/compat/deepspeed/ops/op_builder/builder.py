"""``deepspeed.ops.op_builder.builder``."""

from ds_hf.deepspeed_api.op_builder import OpBuilder

__all__ = ["OpBuilder"]
