"""Hostfiles, filters and lists of cores as functions of DeepSpeed's names and types, for scripts that import them."""

from __future__ import annotations

import base64
import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from ds_hf.launcher.cores import parse_core_list
from ds_hf.launcher.filters import remaining
from ds_hf.launcher.hostfile import parse_hostfile, read_hostfile

__all__ = [
    "encode_world_info",
    "fetch_hostfile",
    "parse_hostfile_lines",
    "parse_inclusion_exclusion",
    "parse_range",
    "parse_range_list",
    "parse_resource_filter",
]


def fetch_hostfile(hostfile_path: str) -> OrderedDict[str, int] | None:
    """Slots of each host in the file; None if there is no such file."""
    pool = read_hostfile(hostfile_path, explicit=False)
    return None if pool is None else OrderedDict((host, len(slots)) for host, slots in pool.items())


def parse_hostfile_lines(hostfile_lines: Iterable[str]) -> OrderedDict[str, int]:
    """Slots of each host in lines of a hostfile."""
    pool = parse_hostfile("\n".join(line.rstrip("\n") for line in hostfile_lines))
    return OrderedDict((host, len(slots)) for host, slots in pool.items())


def parse_resource_filter(
    host_info: Mapping[str, Sequence[int]], include_str: str = "", exclude_str: str = ""
) -> OrderedDict[str, list[int]]:
    """The slots that the two filters leave, by host."""
    chosen = remaining({host: tuple(slots) for host, slots in host_info.items()}, include_str, exclude_str)
    return OrderedDict((host, list(slots)) for host, slots in chosen.items())


def parse_inclusion_exclusion(
    resource_pool: Mapping[str, int], inclusion: str, exclusion: str
) -> OrderedDict[str, list[int]]:
    """``parse_resource_filter`` for numbers of slots."""
    return parse_resource_filter({host: range(slots) for host, slots in resource_pool.items()}, inclusion, exclusion)


def encode_world_info(world_info: Mapping[str, Sequence[int]]) -> str:
    """URL-safe base64 of JSON, which ``deepspeed.launcher.launch --world_info`` takes."""
    return base64.urlsafe_b64encode(json.dumps(world_info).encode("utf-8")).decode("utf-8")


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
    return parse_core_list(range_str, "range")
