"""``deepspeed.runtime.dataloader``."""

from __future__ import annotations

from ds_hf.engine.data import RepeatingLoader

from .._missing import missing

__all__ = ["RepeatingLoader"]
__getattr__ = missing(__name__)
