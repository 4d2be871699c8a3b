"""``deepspeed.ops.lion.fused_lion``."""

from ds_hf.engine.optim.lion import FusedLion

__all__ = ["FusedLion"]
