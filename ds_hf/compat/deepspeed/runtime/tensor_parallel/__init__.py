"""``deepspeed.runtime.tensor_parallel``."""

from __future__ import annotations

from ds_hf.deepspeed_api.tensor_parallel import AUTOTP_MODE
from ds_hf.deepspeed_api.tensor_rules import get_tensor_parallel_config

from ..._missing import missing

__getattr__ = missing(__name__)
