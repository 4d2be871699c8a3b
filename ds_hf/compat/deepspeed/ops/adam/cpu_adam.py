"""``deepspeed.ops.adam.cpu_adam``."""

from __future__ import annotations

from ds_hf.engine.optim.adam import DeepSpeedCPUAdam

from ..._missing import missing

__all__ = ["DeepSpeedCPUAdam"]
__getattr__ = missing(__name__)
