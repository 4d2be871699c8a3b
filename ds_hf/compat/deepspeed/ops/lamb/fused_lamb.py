"""``deepspeed.ops.lamb.fused_lamb``."""

from ds_hf.engine.optim.lamb import FusedLamb

__all__ = ["FusedLamb"]
