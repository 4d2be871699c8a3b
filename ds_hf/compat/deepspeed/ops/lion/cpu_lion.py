"""``deepspeed.ops.lion.cpu_lion``."""

from ds_hf.engine.optim.lion import DeepSpeedCPULion

__all__ = ["DeepSpeedCPULion"]
