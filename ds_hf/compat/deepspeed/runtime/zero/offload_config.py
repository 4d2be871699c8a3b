"""``deepspeed.runtime.zero.offload_config``."""

from ds_hf.deepspeed_api.config import OffloadDeviceEnum, OffloadStateTypeEnum
from ds_hf.config.types.zero import OffloadOptimizerSection as DeepSpeedZeroOffloadOptimizerConfig
from ds_hf.config.types.zero import OffloadParamSection as DeepSpeedZeroOffloadParamConfig

__all__ = [
    "DeepSpeedZeroOffloadOptimizerConfig",
    "DeepSpeedZeroOffloadParamConfig",
    "OffloadDeviceEnum",
    "OffloadStateTypeEnum",
]
