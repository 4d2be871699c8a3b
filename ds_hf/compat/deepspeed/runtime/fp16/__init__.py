"""``deepspeed.runtime.fp16``."""

from . import fused_optimizer, loss_scaler, onebit

__all__ = ["fused_optimizer", "loss_scaler", "onebit"]
