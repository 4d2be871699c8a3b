"""``deepspeed.ops.adam.fused_adam``."""

from ds_hf.engine.optim.adam import FusedAdam

__all__ = ["FusedAdam"]
