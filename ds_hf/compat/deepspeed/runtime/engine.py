"""``deepspeed.runtime.engine``."""

from __future__ import annotations

from ds_hf import Engine as DeepSpeedEngine

from .._missing import missing

__all__ = ["DeepSpeedEngine"]
__getattr__ = missing(__name__)
