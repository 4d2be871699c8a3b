"""``deepspeed.ops.adam.fused_adam``."""

from __future__ import annotations

from ds_hf.engine.optim.adam import FusedAdam

from ..._missing import missing

__all__ = ["FusedAdam"]
__getattr__ = missing(__name__)
