"""``deepspeed.ops.op_builder.all_ops``."""

from ds_hf.deepspeed_api.op_builder import BUILDERS

__all__ = ["ALL_OPS"]

ALL_OPS = {builder.NAME: builder() for builder in BUILDERS.values()}
