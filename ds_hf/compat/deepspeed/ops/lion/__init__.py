"""``deepspeed.ops.lion``."""

from __future__ import annotations

from ds_hf.engine.optim.lion import DeepSpeedCPULion, FusedLion

from ..._missing import missing
from . import cpu_lion, fused_lion

__all__ = ["DeepSpeedCPULion", "FusedLion", "cpu_lion", "fused_lion"]
__getattr__ = missing(__name__)
