"""``deepspeed.runtime.data_pipeline.data_routing.scheduler``."""

from ds_hf.data.token_schedule import RandomLTDScheduler

__all__ = ["RandomLTDScheduler"]
