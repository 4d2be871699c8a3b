"""``deepspeed.runtime.dataloader``."""

from ds_hf.engine.parallel.data import RepeatingLoader
from ds_hf.engine.parallel.data import ShardedLoader as DeepSpeedDataLoader

__all__ = ["DeepSpeedDataLoader", "RepeatingLoader"]
