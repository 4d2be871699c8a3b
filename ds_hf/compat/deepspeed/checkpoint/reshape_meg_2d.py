"""``deepspeed.checkpoint.reshape_meg_2d``: ranks by stage of the pipeline and tensor-parallel rank."""

from __future__ import annotations

from ds_hf.deepspeed_api.checkpoint.reshape import meg_2d_parallel_map, partition_data, reshape_meg_2d_parallel

from .._missing import missing

__all__ = ["meg_2d_parallel_map", "partition_data", "reshape_meg_2d_parallel"]
__getattr__ = missing(__name__)
