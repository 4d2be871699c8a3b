"""``deepspeed.runtime.fp16.onebit.lamb``."""

from ds_hf.engine.optim.onebit.lamb import OnebitLamb

__all__ = ["OnebitLamb"]
