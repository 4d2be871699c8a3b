"""``deepspeed.monitor.wandb``."""

from __future__ import annotations

from ds_hf.engine.observe.monitor import Monitor, WandbMonitor
from ds_hf.engine.observe.monitor.wandb import check_wandb_availability

from .._missing import missing

__all__ = ["Monitor", "WandbMonitor", "check_wandb_availability"]
__getattr__ = missing(__name__)
