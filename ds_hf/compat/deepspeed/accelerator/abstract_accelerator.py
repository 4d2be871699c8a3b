"""``deepspeed.accelerator.abstract_accelerator``."""

from __future__ import annotations

from ds_hf.deepspeed_api.accelerator import Accelerator as DeepSpeedAccelerator

from .._missing import missing

__all__ = ["DeepSpeedAccelerator"]
__getattr__ = missing(__name__)
