"""``deepspeed.runtime``."""

from __future__ import annotations

from ds_hf.deepspeed_api.optimizer_kinds import DeepSpeedOptimizer, ZeROOptimizer

from .._missing import missing
from . import (
    activation_checkpointing,
    base_optimizer,
    checkpoint_engine,
    chunked_cross_entropy,
    comm,
    config,
    dataloader,
    engine,
    fp16,
    hybrid_engine,
    lr_schedules,
    pipe,
    precision_config,
    rollout,
    sparse_tensor,
    torch_autocast,
    utils,
    zero,
)

__all__ = [
    "DeepSpeedOptimizer",
    "ZeROOptimizer",
    "activation_checkpointing",
    "base_optimizer",
    "checkpoint_engine",
    "chunked_cross_entropy",
    "comm",
    "config",
    "dataloader",
    "engine",
    "fp16",
    "hybrid_engine",
    "lr_schedules",
    "pipe",
    "precision_config",
    "rollout",
    "sparse_tensor",
    "torch_autocast",
    "utils",
    "zero",
]
__getattr__ = missing(__name__)
