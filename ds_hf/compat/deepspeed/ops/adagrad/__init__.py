"""``deepspeed.ops.adagrad``."""

from ds_hf.engine.optim.adagrad import DeepSpeedCPUAdagrad

from . import cpu_adagrad

__all__ = ["DeepSpeedCPUAdagrad", "cpu_adagrad"]
