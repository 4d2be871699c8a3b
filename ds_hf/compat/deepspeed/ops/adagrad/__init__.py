"""``deepspeed.ops.adagrad``."""

from __future__ import annotations

from ds_hf.engine.optim.adagrad import DeepSpeedCPUAdagrad

from ..._missing import missing
from . import cpu_adagrad

__all__ = ["DeepSpeedCPUAdagrad", "cpu_adagrad"]
__getattr__ = missing(__name__)
