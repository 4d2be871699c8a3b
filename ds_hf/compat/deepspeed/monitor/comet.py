"""``deepspeed.monitor.comet``."""

from __future__ import annotations

from ds_hf.engine.observe.monitor import CometMonitor, Event, Monitor
from ds_hf.engine.observe.monitor.comet import EventsLogScheduler, check_comet_availability

from .._missing import missing

__all__ = ["CometMonitor", "Event", "EventsLogScheduler", "Monitor", "check_comet_availability"]
__getattr__ = missing(__name__)
