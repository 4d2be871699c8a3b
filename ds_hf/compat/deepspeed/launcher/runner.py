"""``deepspeed.launcher.runner``: what ``accelerate launch`` and schedulers' scripts import or run with ``-m``."""

from __future__ import annotations

import base64
import json
import os
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from ds_hf.launch_cli import deepspeed_main as main
from ds_hf.launcher.environment import EXPORT_PREFIXES as _PREFIXES
from ds_hf.launcher.filters import remaining as _remaining
from ds_hf.launcher.hostfile import DEFAULT_HOSTFILE as DLTS_HOSTFILE
from ds_hf.launcher.hostfile import parse_hostfile as _parse
from ds_hf.launcher.hostfile import read_hostfile as _read

from .._missing import missing
from .constants import PDSH_MAX_FAN_OUT

# accelerate writes the variables of a multi-node run into the file of this name.
DEEPSPEED_ENVIRONMENT_NAME = os.getenv("DS_ENV_FILE", ".deepspeed_env")
DEEPSPEED_ENVIRONMENT_PATHS = [os.path.expanduser("~"), "."]
EXPORT_ENVS = list(_PREFIXES)


def fetch_hostfile(hostfile_path: str) -> OrderedDict[str, int] | None:
    """Slots of each host in the file; None if there is no such file."""
    pool = _read(hostfile_path, explicit=False)
    return None if pool is None else OrderedDict((host, len(slots)) for host, slots in pool.items())


def _parse_hostfile(hostfile_lines: Iterable[str]) -> OrderedDict[str, int]:
    pool = _parse("\n".join(line.rstrip("\n") for line in hostfile_lines))
    return OrderedDict((host, len(slots)) for host, slots in pool.items())


def parse_resource_filter(
    host_info: Mapping[str, Sequence[int]], include_str: str = "", exclude_str: str = ""
) -> OrderedDict[str, list[int]]:
    """The slots that the two filters leave, by host."""
    chosen = _remaining({host: tuple(slots) for host, slots in host_info.items()}, include_str, exclude_str)
    return OrderedDict((host, list(slots)) for host, slots in chosen.items())


def parse_inclusion_exclusion(
    resource_pool: Mapping[str, int], inclusion: str, exclusion: str
) -> OrderedDict[str, list[int]]:
    """``parse_resource_filter`` for numbers of slots."""
    return parse_resource_filter({host: range(slots) for host, slots in resource_pool.items()}, inclusion, exclusion)


def encode_world_info(world_info: Mapping[str, Sequence[int]]) -> str:
    """URL-safe base64 of JSON, which ``deepspeed.launcher.launch --world_info`` takes."""
    return base64.urlsafe_b64encode(json.dumps(world_info).encode("utf-8")).decode("utf-8")


__getattr__ = missing(__name__)

if __name__ == "__main__":
    main()
