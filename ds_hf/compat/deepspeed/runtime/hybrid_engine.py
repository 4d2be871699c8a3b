"""``deepspeed.runtime.hybrid_engine``: every engine of ds_hf generates."""

from ds_hf import Engine as DeepSpeedHybridEngine

__all__ = ["DeepSpeedHybridEngine"]
