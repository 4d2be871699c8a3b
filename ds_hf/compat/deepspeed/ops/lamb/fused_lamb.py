"""``deepspeed.ops.lamb.fused_lamb``."""

from __future__ import annotations

from ds_hf.engine.optim.lamb import FusedLamb

from ..._missing import missing

__all__ = ["FusedLamb"]
__getattr__ = missing(__name__)
