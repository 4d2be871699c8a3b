"""``deepspeed.utils.numa``."""

from __future__ import annotations

from ds_hf.launcher.cores import numa_cores as get_numa_cores
from ds_hf.launcher.deepspeed_names import parse_range, parse_range_list

from .._missing import missing

__all__ = ["get_numa_cores", "parse_range", "parse_range_list"]


__getattr__ = missing(__name__)
