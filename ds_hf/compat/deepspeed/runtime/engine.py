"""``deepspeed.runtime.engine``."""

from ds_hf import Engine as DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]
