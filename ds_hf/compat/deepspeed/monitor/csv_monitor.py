"""``deepspeed.monitor.csv_monitor``."""

from __future__ import annotations

from ds_hf.engine.observe.monitor import CsvMonitor as csvMonitor
from ds_hf.engine.observe.monitor import Monitor

from .._missing import missing

__all__ = ["Monitor", "csvMonitor"]
__getattr__ = missing(__name__)
