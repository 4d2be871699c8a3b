"""``deepspeed.ops.adam``."""

from __future__ import annotations

from ds_hf.engine.optim.adam import DeepSpeedCPUAdam, FusedAdam

from ..._missing import missing
from . import cpu_adam, fused_adam

__all__ = ["DeepSpeedCPUAdam", "FusedAdam", "cpu_adam", "fused_adam"]
__getattr__ = missing(__name__)
