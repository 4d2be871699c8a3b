"""``deepspeed.inference.config``: the configuration of ``init_inference``."""

from __future__ import annotations

from ds_hf.deepspeed_api.inference import DeepSpeedInferenceConfig

from .._missing import missing

__all__ = ["DeepSpeedInferenceConfig"]
__getattr__ = missing(__name__)
