"""``deepspeed.runtime.fp16.onebit.zoadam``."""

from ds_hf.engine.optim.onebit.zero_one import ZeroOneAdam

__all__ = ["ZeroOneAdam"]
