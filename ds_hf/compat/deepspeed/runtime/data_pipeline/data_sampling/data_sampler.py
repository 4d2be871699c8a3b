"""``deepspeed.runtime.data_pipeline.data_sampling.data_sampler``."""

from ds_hf.data.sampler import DeepSpeedDataSampler

__all__ = ["DeepSpeedDataSampler"]
