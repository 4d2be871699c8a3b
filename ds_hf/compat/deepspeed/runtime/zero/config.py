"""``deepspeed.runtime.zero.config``."""

from __future__ import annotations

from ds_hf.deepspeed_api.config import DeepSpeedZeroConfig, OffloadDeviceEnum, ZeroStageEnum
from ds_hf.config.types.zero import OffloadOptimizerSection as DeepSpeedZeroOffloadOptimizerConfig
from ds_hf.config.types.zero import OffloadParamSection as DeepSpeedZeroOffloadParamConfig

from ..._missing import missing

__all__ = [
    "DeepSpeedZeroConfig",
    "DeepSpeedZeroOffloadOptimizerConfig",
    "DeepSpeedZeroOffloadParamConfig",
    "OffloadDeviceEnum",
    "ZeroStageEnum",
]
__getattr__ = missing(__name__)
