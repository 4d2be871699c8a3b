"""``deepspeed.utils.timer``."""

from ds_hf.engine.comm.comms_logger import trim_mean
from ds_hf.deepspeed_api.throughput import ThroughputTimer
from ds_hf.engine.observe.timers import (
    BACKWARD_GLOBAL_TIMER,
    BACKWARD_MICRO_TIMER,
    BACKWARD_INNER_GLOBAL_TIMER,
    BACKWARD_INNER_MICRO_TIMER,
    BACKWARD_REDUCE_GLOBAL_TIMER,
    BACKWARD_REDUCE_MICRO_TIMER,
    FORWARD_GLOBAL_TIMER,
    FORWARD_MICRO_TIMER,
    STEP_GLOBAL_TIMER,
    STEP_MICRO_TIMER,
    SynchronizedWallClockTimer,
)

__all__ = [
    "BACKWARD_GLOBAL_TIMER",
    "BACKWARD_INNER_GLOBAL_TIMER",
    "BACKWARD_INNER_MICRO_TIMER",
    "BACKWARD_MICRO_TIMER",
    "BACKWARD_REDUCE_GLOBAL_TIMER",
    "BACKWARD_REDUCE_MICRO_TIMER",
    "FORWARD_GLOBAL_TIMER",
    "FORWARD_MICRO_TIMER",
    "STEP_GLOBAL_TIMER",
    "STEP_MICRO_TIMER",
    "SynchronizedWallClockTimer",
    "ThroughputTimer",
    "trim_mean",
]
