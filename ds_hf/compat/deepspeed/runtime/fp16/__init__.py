"""``deepspeed.runtime.fp16``."""

from . import fused_optimizer, loss_scaler, onebit, unfused_optimizer

__all__ = ["fused_optimizer", "loss_scaler", "onebit", "unfused_optimizer"]
