"""``deepspeed.runtime.lr_schedules``."""

from __future__ import annotations

from ds_hf.engine.lr_schedules import VALID_LR_SCHEDULES, LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR

from .._missing import missing

__all__ = ["VALID_LR_SCHEDULES", "LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"]
__getattr__ = missing(__name__)
