"""``deepspeed.runtime.fp16.onebit``."""

from ds_hf.engine.optim.onebit.adam import OnebitAdam
from ds_hf.engine.optim.onebit.lamb import OnebitLamb
from ds_hf.engine.optim.onebit.zero_one import ZeroOneAdam

from . import adam, lamb, zoadam

__all__ = ["OnebitAdam", "OnebitLamb", "ZeroOneAdam", "adam", "lamb", "zoadam"]
