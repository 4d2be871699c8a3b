"""``deepspeed.monitor.tensorboard``."""

from ds_hf.engine.observe.monitor import Monitor, TensorBoardMonitor
from ds_hf.engine.observe.monitor.tensorboard import check_tb_availability

__all__ = ["Monitor", "TensorBoardMonitor", "check_tb_availability"]
