"""``deepspeed.checkpoint.reshape_meg_2d``: ranks by stage of the pipeline and tensor-parallel rank."""

from .reshape_utils import meg_2d_parallel_map, partition_data, reshape_meg_2d_parallel

__all__ = ["meg_2d_parallel_map", "partition_data", "reshape_meg_2d_parallel"]
