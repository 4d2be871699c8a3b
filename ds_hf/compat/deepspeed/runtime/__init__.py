"""``deepspeed.runtime``."""

from __future__ import annotations

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
from .base_optimizer import DeepSpeedOptimizer, ZeROOptimizer

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
