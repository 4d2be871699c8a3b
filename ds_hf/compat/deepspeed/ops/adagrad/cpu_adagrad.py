"""``deepspeed.ops.adagrad.cpu_adagrad``."""

from ds_hf.engine.optim.adagrad import DeepSpeedCPUAdagrad

__all__ = ["DeepSpeedCPUAdagrad"]
