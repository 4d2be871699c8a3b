"""``deepspeed.checkpoint.deepspeed_checkpoint``: a checkpoint's files by rank."""

from __future__ import annotations

from ds_hf.deepspeed_api.checkpoint.opened import (
    ARGS_KEY,
    CHECKPOINT_INFO_KEY,
    EMBEDDING_LAYER_INDEX,
    FINAL_LAYER_NORM_INDEX,
    ITERATION_KEY,
    LAYER_CONCAT_DIM,
    LAYER_FILE_PREFIX_PATTERN,
    SEQUENTIAL_LAYERS,
    DeepSpeedCheckpoint,
)

from .._missing import missing

__all__ = [
    "ARGS_KEY",
    "CHECKPOINT_INFO_KEY",
    "EMBEDDING_LAYER_INDEX",
    "FINAL_LAYER_NORM_INDEX",
    "ITERATION_KEY",
    "LAYER_CONCAT_DIM",
    "LAYER_FILE_PREFIX_PATTERN",
    "SEQUENTIAL_LAYERS",
    "DeepSpeedCheckpoint",
]
__getattr__ = missing(__name__)
