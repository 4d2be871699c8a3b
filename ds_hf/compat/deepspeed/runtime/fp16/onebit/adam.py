"""``deepspeed.runtime.fp16.onebit.adam``."""

from __future__ import annotations

from ds_hf.engine.optim.onebit.adam import OnebitAdam

from ...._missing import missing

__all__ = ["OnebitAdam"]
__getattr__ = missing(__name__)
