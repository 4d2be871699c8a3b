"""``deepspeed.monitor.tensorboard``."""

from __future__ import annotations

from ds_hf.engine.observe.monitor import Monitor, TensorBoardMonitor
from ds_hf.engine.observe.monitor.tensorboard import check_tb_availability

from .._missing import missing

__all__ = ["Monitor", "TensorBoardMonitor", "check_tb_availability"]
__getattr__ = missing(__name__)
