"""``deepspeed.utils.timer``."""

from __future__ import annotations

from ds_hf.engine.dist.comms_logger import trim_mean
from ds_hf.engine.timers import SynchronizedWallClockTimer, ThroughputTimer

from .._missing import missing

__all__ = ["SynchronizedWallClockTimer", "ThroughputTimer", "trim_mean"]
__getattr__ = missing(__name__)
