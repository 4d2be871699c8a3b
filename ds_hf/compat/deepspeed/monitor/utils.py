"""``deepspeed.monitor.utils``."""

from ds_hf.engine.observe.monitor.comet import check_comet_availability
from ds_hf.engine.observe.monitor.tensorboard import check_tb_availability
from ds_hf.engine.observe.monitor.wandb import check_wandb_availability

__all__ = ["check_comet_availability", "check_tb_availability", "check_wandb_availability"]
