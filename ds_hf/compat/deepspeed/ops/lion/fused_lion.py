"""``deepspeed.ops.lion.fused_lion``."""

from __future__ import annotations

from ds_hf.engine.optim.lion import FusedLion

from ..._missing import missing

__all__ = ["FusedLion"]
__getattr__ = missing(__name__)
