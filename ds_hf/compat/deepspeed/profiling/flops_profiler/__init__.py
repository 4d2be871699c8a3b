"""``deepspeed.profiling.flops_profiler``: operations, parameters and time of a model."""

from ds_hf.engine.observe.flops import (
    FlopsProfiler,
    duration_to_string,
    flops_to_string,
    get_model_profile,
    macs_to_string,
    number_to_string,
    params_to_string,
)

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
