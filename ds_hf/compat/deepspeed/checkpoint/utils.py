"""``deepspeed.checkpoint.utils``."""

from __future__ import annotations

from ds_hf.engine.checkpoint.consolidate import clone_tensors_for_torch_save
from ds_hf.checkpoint.deepspeed.layout import (
    get_layer_ckpt_name_for_rank,
    get_model_ckpt_name_for_rank,
    get_zero_ckpt_name_for_rank,
)

from .._missing import missing

__all__ = [
    "clone_tensors_for_torch_save",
    "get_layer_ckpt_name_for_rank",
    "get_model_ckpt_name_for_rank",
    "get_zero_ckpt_name_for_rank",
]
__getattr__ = missing(__name__)
