"""``deepspeed.runtime.fp16.loss_scaler``."""

from __future__ import annotations

from ds_hf.engine.optim.loss_scaler import DynamicLossScaler
from ds_hf.engine.optim.loss_scaler import StaticLossScaler as LossScaler

from ..._missing import missing

__all__ = ["DynamicLossScaler", "LossScaler"]
__getattr__ = missing(__name__)
