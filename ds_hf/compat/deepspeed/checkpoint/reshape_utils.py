"""``deepspeed.checkpoint.reshape_utils``: files by their names, states merged."""

from __future__ import annotations

from ds_hf.deepspeed_api.checkpoint.reshape import (
    basic_folder_validation,
    get_files,
    get_files_with_prefix,
    get_zero_files,
    merge_state,
    merge_state_dict,
    merge_state_list,
    partition_data,
    sort_zero_files,
    validate_files,
)

from .._missing import missing

__all__ = [
    "basic_folder_validation",
    "get_files",
    "get_files_with_prefix",
    "get_zero_files",
    "merge_state",
    "merge_state_dict",
    "merge_state_list",
    "partition_data",
    "sort_zero_files",
    "validate_files",
]
__getattr__ = missing(__name__)
