"""``deepspeed.monitor.comet``."""

from ds_hf.engine.observe.monitor import CometMonitor, Event, Monitor
from ds_hf.engine.observe.monitor.comet import EventsLogScheduler, check_comet_availability

__all__ = ["CometMonitor", "Event", "EventsLogScheduler", "Monitor", "check_comet_availability"]
