"""``deepspeed.runtime.zero.utils``."""

from __future__ import annotations

from ds_hf.deepspeed_api.runtime_utils import is_zero_param, is_zero_supported_optimizer
from ds_hf.errors import DsHfError as ZeRORuntimeException

from ..._missing import missing

__all__ = ["ZeRORuntimeException", "is_zero_param", "is_zero_supported_optimizer"]
__getattr__ = missing(__name__)
