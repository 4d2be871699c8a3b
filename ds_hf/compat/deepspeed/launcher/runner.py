"""``deepspeed.launcher.runner``: what ``accelerate launch`` and schedulers' scripts import or run with ``-m``."""

from __future__ import annotations

import os

from ds_hf.cli.launch import deepspeed_main as main
from ds_hf.launcher.deepspeed_names import (
    encode_world_info,
    fetch_hostfile,
    parse_inclusion_exclusion,
    parse_resource_filter,
)
from ds_hf.launcher.deepspeed_names import parse_hostfile_lines as _parse_hostfile
from ds_hf.launcher.environment import EXPORT_PREFIXES as _PREFIXES
from ds_hf.launcher.hostfile import DEFAULT_HOSTFILE as DLTS_HOSTFILE

from .constants import PDSH_MAX_FAN_OUT

# accelerate writes the variables of a multi-node run into the file of this name.
DEEPSPEED_ENVIRONMENT_NAME = os.getenv("DS_ENV_FILE", ".deepspeed_env")
DEEPSPEED_ENVIRONMENT_PATHS = [os.path.expanduser("~"), "."]
EXPORT_ENVS = list(_PREFIXES)


if __name__ == "__main__":
    main()
