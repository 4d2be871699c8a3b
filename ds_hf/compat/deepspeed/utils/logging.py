"""``deepspeed.utils.logging``: ds_hf's logger, and messages of chosen ranks."""

from __future__ import annotations

from ds_hf.deepspeed_api.messages import log_dist, print_json_dist, set_log_level_from_string, warning_once
from ds_hf.log import logger

from .._missing import missing

__all__ = ["log_dist", "logger", "print_json_dist", "set_log_level_from_string", "warning_once"]
__getattr__ = missing(__name__)
