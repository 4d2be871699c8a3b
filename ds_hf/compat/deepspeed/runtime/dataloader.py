"""``deepspeed.runtime.dataloader``."""

from __future__ import annotations

from ds_hf.engine.parallel.data import RepeatingLoader
from ds_hf.engine.parallel.data import ShardedLoader as DeepSpeedDataLoader

from .._missing import missing

__all__ = ["DeepSpeedDataLoader", "RepeatingLoader"]
__getattr__ = missing(__name__)
