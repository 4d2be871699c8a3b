"""``deepspeed.runtime.tensor_parallel``."""

from __future__ import annotations

from ..._missing import missing
from .config import AUTOTP_MODE, get_tensor_parallel_config

__getattr__ = missing(__name__)
