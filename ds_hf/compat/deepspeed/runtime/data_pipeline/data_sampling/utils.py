"""``deepspeed.runtime.data_pipeline.data_sampling.utils``."""

from typing import Any

from ds_hf.data.index_files import MMapIndexedDatasetBuilder, find_fit_int_dtype

__all__ = ["close_mmap_dataset_builder", "create_mmap_dataset_builder", "find_fit_int_dtype"]


def create_mmap_dataset_builder(fname: str, dtype: Any) -> MMapIndexedDatasetBuilder:
    """A builder of ``fname``.bin."""
    return MMapIndexedDatasetBuilder(f"{fname}.bin", dtype)


def close_mmap_dataset_builder(builder: MMapIndexedDatasetBuilder, fname: str) -> None:
    """End the document, and write ``fname``.idx."""
    builder.end_document()
    builder.finalize(f"{fname}.idx")
