"""``deepspeed.inference.config``: the configuration of ``init_inference``."""

from ds_hf.deepspeed_api.inference import DeepSpeedInferenceConfig

__all__ = ["DeepSpeedInferenceConfig"]
