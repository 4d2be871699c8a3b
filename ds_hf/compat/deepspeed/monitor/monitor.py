"""``deepspeed.monitor.monitor``."""

from ds_hf.engine.observe.monitor import CometMonitor, Monitor, MonitorMaster, TensorBoardMonitor, WandbMonitor
from ds_hf.engine.observe.monitor import CsvMonitor as csvMonitor

__all__ = ["CometMonitor", "Monitor", "MonitorMaster", "TensorBoardMonitor", "WandbMonitor", "csvMonitor"]
