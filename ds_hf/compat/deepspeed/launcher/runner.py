"""``deepspeed.launcher.runner``: the one name that ``accelerate launch`` asks for."""

from __future__ import annotations

import os

from .._missing import missing

# accelerate writes the variables of a multi-node run into the file of this name in the user's home.
DEEPSPEED_ENVIRONMENT_NAME = os.getenv("DS_ENV_FILE", ".deepspeed_env")

__getattr__ = missing(__name__)
