"""``deepspeed.monitor.csv_monitor``."""

from ds_hf.engine.observe.monitor import CsvMonitor as csvMonitor
from ds_hf.engine.observe.monitor import Monitor

__all__ = ["Monitor", "csvMonitor"]
