"""``deepspeed.runtime.fp16.onebit.zoadam``."""

from __future__ import annotations

from ds_hf.engine.optim.onebit.zero_one import ZeroOneAdam

from ...._missing import missing

__all__ = ["ZeroOneAdam"]
__getattr__ = missing(__name__)
