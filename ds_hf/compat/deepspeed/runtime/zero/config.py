"""``deepspeed.runtime.zero.config``."""

from __future__ import annotations

from ds_hf.config.deepspeed_view import OffloadDeviceEnum, ZeroStageEnum
from ds_hf.config.types.zero import ZeroSection as DeepSpeedZeroConfig

from ..._missing import missing

__all__ = ["DeepSpeedZeroConfig", "OffloadDeviceEnum", "ZeroStageEnum"]
__getattr__ = missing(__name__)
