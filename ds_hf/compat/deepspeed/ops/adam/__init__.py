"""``deepspeed.ops.adam``."""

from __future__ import annotations

from ds_hf.engine.optim.adam import DeepSpeedCPUAdam, FusedAdam

from ..._missing import missing

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]
__getattr__ = missing(__name__)
