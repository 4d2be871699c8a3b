"""``deepspeed.ops``."""

from ds_hf.deepspeed_api.op_builder import compatible_ops

from . import adagrad, adam, aio, lamb, lion, op_builder, sparse_attention

__all__ = ["adagrad", "adam", "aio", "lamb", "lion", "op_builder", "sparse_attention"]
__compatible_ops__ = compatible_ops()
