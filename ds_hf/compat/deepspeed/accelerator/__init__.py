"""``deepspeed.accelerator``: the device of this process."""

from ds_hf.deepspeed_api.accelerator import get_accelerator, is_current_accelerator_supported
from ds_hf.deepspeed_api.accelerator import Accelerator as DeepSpeedAccelerator

from . import abstract_accelerator, real_accelerator

__all__ = [
    "DeepSpeedAccelerator",
    "abstract_accelerator",
    "get_accelerator",
    "is_current_accelerator_supported",
    "real_accelerator",
]
