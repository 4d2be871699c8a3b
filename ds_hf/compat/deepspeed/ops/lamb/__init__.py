"""``deepspeed.ops.lamb``."""

from ds_hf.engine.optim.lamb import FusedLamb

from . import fused_lamb

__all__ = ["FusedLamb", "fused_lamb"]
