"""``deepspeed.ops.adagrad.cpu_adagrad``."""

from __future__ import annotations

from ds_hf.engine.optim.adagrad import DeepSpeedCPUAdagrad

from ..._missing import missing

__all__ = ["DeepSpeedCPUAdagrad"]
__getattr__ = missing(__name__)
