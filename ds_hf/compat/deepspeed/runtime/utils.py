"""``deepspeed.runtime.utils``: memory, norms, overflow, partitions."""

from __future__ import annotations

from ds_hf.deepspeed_api.partitioned_tensor import PartitionedTensor
from ds_hf.deepspeed_api.runtime_utils import (
    CheckOverflow,
    DummyOptim,
    call_to_str,
    clip_grad_norm_,
    clip_tensors_by_global_norm,
    empty_cache,
    ensure_directory_exists,
    get_global_norm,
    get_global_norm_of_tensors,
    get_only_unique_item,
    get_weight_norm,
    has_inf_or_nan,
    mask_nan_or_inf_with_val_inplace,
    memory_status,
    move_to_device,
    noop_context,
    noop_decorator,
    partition_balanced,
    partition_uniform,
    prefix_sum_inc,
    see_memory_usage,
    set_random_seed,
)
from ds_hf.engine.zero.cut import is_marked as is_model_parallel_parameter

from .._missing import missing

__all__ = [
    "CheckOverflow",
    "DummyOptim",
    "PartitionedTensor",
    "call_to_str",
    "clip_grad_norm_",
    "clip_tensors_by_global_norm",
    "empty_cache",
    "ensure_directory_exists",
    "get_global_norm",
    "get_global_norm_of_tensors",
    "get_only_unique_item",
    "get_weight_norm",
    "has_inf_or_nan",
    "is_model_parallel_parameter",
    "mask_nan_or_inf_with_val_inplace",
    "memory_status",
    "move_to_device",
    "noop_context",
    "noop_decorator",
    "partition_balanced",
    "partition_uniform",
    "prefix_sum_inc",
    "see_memory_usage",
    "set_random_seed",
]
__getattr__ = missing(__name__)
