"""``deepspeed.runtime.hybrid_engine``: every engine of ds_hf generates."""

from __future__ import annotations

from ds_hf import Engine as DeepSpeedHybridEngine

from .._missing import missing

__all__ = ["DeepSpeedHybridEngine"]
__getattr__ = missing(__name__)
