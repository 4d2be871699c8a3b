"""``deepspeed.runtime.zero.offload_config``."""

from __future__ import annotations

from ds_hf.config.deepspeed_view import OffloadDeviceEnum

from ..._missing import missing

__all__ = ["OffloadDeviceEnum"]
__getattr__ = missing(__name__)
