"""``deepspeed.ops.lion``."""

from ds_hf.engine.optim.lion import DeepSpeedCPULion, FusedLion

from . import cpu_lion, fused_lion

__all__ = ["DeepSpeedCPULion", "FusedLion", "cpu_lion", "fused_lion"]
