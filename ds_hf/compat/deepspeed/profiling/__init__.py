"""``deepspeed.profiling``."""

from __future__ import annotations


from .._missing import missing
from . import flops_profiler

__all__ = ["flops_profiler"]
__getattr__ = missing(__name__)
