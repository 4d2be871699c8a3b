"""``deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset``."""

from ds_hf.data.index_files import MMapIndexedDataset, MMapIndexedDatasetBuilder

__all__ = ["MMapIndexedDataset", "MMapIndexedDatasetBuilder"]
