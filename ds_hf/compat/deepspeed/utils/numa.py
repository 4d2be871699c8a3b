"""``deepspeed.utils.numa``."""

from ds_hf.launcher.cores import numa_cores as get_numa_cores
from ds_hf.launcher.deepspeed_names import parse_range, parse_range_list

__all__ = ["get_numa_cores", "parse_range", "parse_range_list"]
