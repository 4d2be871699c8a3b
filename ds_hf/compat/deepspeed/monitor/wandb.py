"""``deepspeed.monitor.wandb``."""

from ds_hf.engine.observe.monitor import Monitor, WandbMonitor
from ds_hf.engine.observe.monitor.wandb import check_wandb_availability

__all__ = ["Monitor", "WandbMonitor", "check_wandb_availability"]
