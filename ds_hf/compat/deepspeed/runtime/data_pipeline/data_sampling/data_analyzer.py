"""``deepspeed.runtime.data_pipeline.data_sampling.data_analyzer``."""

from ds_hf.data.analyzer import DataAnalyzer, DistributedDataAnalyzer

__all__ = ["DataAnalyzer", "DistributedDataAnalyzer"]
