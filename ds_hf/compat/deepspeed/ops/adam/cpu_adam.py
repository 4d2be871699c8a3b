"""``deepspeed.ops.adam.cpu_adam``."""

from ds_hf.engine.optim.adam import DeepSpeedCPUAdam

__all__ = ["DeepSpeedCPUAdam"]
