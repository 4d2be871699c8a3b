"""``deepspeed.checkpoint.constants``: keys and names of files in checkpoints."""

from __future__ import annotations

from ds_hf.deepspeed_api.checkpoint.constants import *  # noqa: F403
from ds_hf.deepspeed_api.checkpoint.constants import __all__ as __all__

from .._missing import missing

__getattr__ = missing(__name__)
