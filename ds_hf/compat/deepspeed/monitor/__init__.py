"""``deepspeed.monitor``."""

from __future__ import annotations

from . import comet, config, csv_monitor, monitor, tensorboard, utils, wandb
from .._missing import missing

__all__ = ["comet", "config", "csv_monitor", "monitor", "tensorboard", "utils", "wandb"]
__getattr__ = missing(__name__)
