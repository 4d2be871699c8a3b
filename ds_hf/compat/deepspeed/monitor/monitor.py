"""``deepspeed.monitor.monitor``."""

from __future__ import annotations

from ds_hf.engine.observe.monitor import CometMonitor, Monitor, MonitorMaster, TensorBoardMonitor, WandbMonitor
from ds_hf.engine.observe.monitor import CsvMonitor as csvMonitor

from .._missing import missing

__all__ = ["CometMonitor", "Monitor", "MonitorMaster", "TensorBoardMonitor", "WandbMonitor", "csvMonitor"]
__getattr__ = missing(__name__)
