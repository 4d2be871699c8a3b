"""``deepspeed.utils.timer``."""

from __future__ import annotations

from ds_hf.engine.comm.comms_logger import trim_mean
from ds_hf.deepspeed_api.throughput import ThroughputTimer
from ds_hf.engine.breakdown import SynchronizedWallClockTimer

from .._missing import missing

__all__ = ["SynchronizedWallClockTimer", "ThroughputTimer", "trim_mean"]
__getattr__ = missing(__name__)
