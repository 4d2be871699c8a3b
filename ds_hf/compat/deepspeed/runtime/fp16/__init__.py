"""``deepspeed.runtime.fp16``."""

from . import loss_scaler, onebit

__all__ = ["loss_scaler", "onebit"]
