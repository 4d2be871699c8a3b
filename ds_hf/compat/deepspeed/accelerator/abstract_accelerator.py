"""``deepspeed.accelerator.abstract_accelerator``."""

from ds_hf.deepspeed_api.accelerator import Accelerator as DeepSpeedAccelerator

__all__ = ["DeepSpeedAccelerator"]
