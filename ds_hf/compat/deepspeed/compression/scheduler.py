"""``deepspeed.compression.scheduler``."""

from ds_hf.compression import compression_scheduler

__all__ = ["compression_scheduler"]
