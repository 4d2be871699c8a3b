"""``deepspeed.checkpoint.utils``."""

from ds_hf.engine.checkpoint.consolidate import clone_tensors_for_torch_save
from ds_hf.checkpoint.deepspeed.layout import (
    get_layer_ckpt_name_for_rank,
    get_model_ckpt_name_for_rank,
    get_zero_ckpt_name_for_rank,
)

__all__ = [
    "clone_tensors_for_torch_save",
    "get_layer_ckpt_name_for_rank",
    "get_model_ckpt_name_for_rank",
    "get_zero_ckpt_name_for_rank",
]
