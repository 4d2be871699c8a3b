"""``deepspeed.runtime.zero.config``."""

from ds_hf.deepspeed_api.config import DeepSpeedZeroConfig, OffloadDeviceEnum, ZeroStageEnum
from ds_hf.config.types.zero import OffloadOptimizerSection as DeepSpeedZeroOffloadOptimizerConfig
from ds_hf.config.types.zero import OffloadParamSection as DeepSpeedZeroOffloadParamConfig

__all__ = [
    "DeepSpeedZeroConfig",
    "DeepSpeedZeroOffloadOptimizerConfig",
    "DeepSpeedZeroOffloadParamConfig",
    "OffloadDeviceEnum",
    "ZeroStageEnum",
]
