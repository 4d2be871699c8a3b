"""``deepspeed.ops.lion.cpu_lion``."""

from __future__ import annotations

from ds_hf.engine.optim.lion import DeepSpeedCPULion

from ..._missing import missing

__all__ = ["DeepSpeedCPULion"]
__getattr__ = missing(__name__)
