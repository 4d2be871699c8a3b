"""``deepspeed.utils.numa``."""

from __future__ import annotations

from ds_hf.launcher.cores import numa_cores as get_numa_cores
from ds_hf.launcher.cores import parse_core_list as _parse

from .._missing import missing

__all__ = ["get_numa_cores", "parse_range", "parse_range_list"]


def parse_range(rng: str) -> range:
    """``3`` or ``2-4``, both ends included.

    Raises:
        ValueError: it is neither.
    """
    numbers = parse_range_list(rng) if "," not in rng else []
    if not numbers:
        raise ValueError(f"{rng[:60]!r} is not a range of numbers: write such as 3 or 2-4")
    return range(numbers[0], numbers[-1] + 1)


def parse_range_list(range_str: str) -> list[int]:
    """``0,2-4`` as [0, 2, 3, 4].

    Raises:
        ValueError: it is not a list of ranges that ascend and do not overlap.
    """
    return _parse(range_str, "range")


__getattr__ = missing(__name__)
