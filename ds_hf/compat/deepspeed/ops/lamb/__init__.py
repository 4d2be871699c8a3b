"""``deepspeed.ops.lamb``."""

from __future__ import annotations

from ds_hf.engine.optim.lamb import FusedLamb

from ..._missing import missing
from . import fused_lamb

__all__ = ["FusedLamb", "fused_lamb"]
__getattr__ = missing(__name__)
