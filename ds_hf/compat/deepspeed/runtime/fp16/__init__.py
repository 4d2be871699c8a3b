"""``deepspeed.runtime.fp16``."""

from __future__ import annotations


from ..._missing import missing
from . import loss_scaler, onebit

__all__ = ["loss_scaler", "onebit"]
__getattr__ = missing(__name__)
