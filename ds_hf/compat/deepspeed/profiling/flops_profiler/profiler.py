"""``deepspeed.profiling.flops_profiler.profiler``."""

from ds_hf.engine.observe.flops import *  # noqa: F403
from ds_hf.engine.observe.flops import __all__ as __all__
