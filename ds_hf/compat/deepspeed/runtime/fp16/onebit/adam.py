"""``deepspeed.runtime.fp16.onebit.adam``."""

from ds_hf.engine.optim.onebit.adam import OnebitAdam

__all__ = ["OnebitAdam"]
