"""``deepspeed.runtime.zero.offload_config``."""

from __future__ import annotations

from ds_hf.deepspeed_api.config import OffloadDeviceEnum, OffloadStateTypeEnum
from ds_hf.config.types.zero import OffloadOptimizerSection as DeepSpeedZeroOffloadOptimizerConfig
from ds_hf.config.types.zero import OffloadParamSection as DeepSpeedZeroOffloadParamConfig

from ..._missing import missing

__all__ = [
    "DeepSpeedZeroOffloadOptimizerConfig",
    "DeepSpeedZeroOffloadParamConfig",
    "OffloadDeviceEnum",
    "OffloadStateTypeEnum",
]
__getattr__ = missing(__name__)
