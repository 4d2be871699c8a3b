"""``deepspeed.ops.lion``."""

from __future__ import annotations

from ds_hf.engine.optim.lion import DeepSpeedCPULion, FusedLion

from ..._missing import missing

__all__ = ["DeepSpeedCPULion", "FusedLion"]
__getattr__ = missing(__name__)
