"""``deepspeed.profiling.flops_profiler``: operations, parameters and time of a model."""

from __future__ import annotations

from ds_hf.engine.observe.flops import (
    FlopsProfiler,
    duration_to_string,
    flops_to_string,
    get_model_profile,
    macs_to_string,
    number_to_string,
    params_to_string,
)

from ..._missing import missing
from . import profiler

__all__ = [
    "FlopsProfiler",
    "duration_to_string",
    "flops_to_string",
    "get_model_profile",
    "macs_to_string",
    "number_to_string",
    "params_to_string",
    "profiler",
]
__getattr__ = missing(__name__)
