"""``deepspeed.runtime.fp16.onebit.lamb``."""

from __future__ import annotations

from ds_hf.engine.optim.onebit.lamb import OnebitLamb

from ...._missing import missing

__all__ = ["OnebitLamb"]
__getattr__ = missing(__name__)
