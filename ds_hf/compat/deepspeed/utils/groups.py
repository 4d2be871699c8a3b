"""``deepspeed.utils.groups``: the process groups of a run. ds_hf has one axis so far, data: every other has size 1."""

from __future__ import annotations

from ds_hf.engine.dist.process_group import ProcessGroup, get_rank, get_world_group, get_world_size

from .._missing import missing


def _get_data_parallel_group() -> ProcessGroup:
    return get_world_group()


def _get_data_parallel_world_size() -> int:
    return get_world_size()


def _get_data_parallel_rank() -> int:
    return get_rank()


def _get_model_parallel_world_size() -> int:
    return 1


def _get_sequence_parallel_world_size() -> int:
    return 1


def _get_sequence_parallel_rank() -> int:
    return 0


get_data_parallel_group = _get_data_parallel_group
get_data_parallel_rank = _get_data_parallel_rank
get_data_parallel_world_size = _get_data_parallel_world_size
get_model_parallel_rank = get_tensor_model_parallel_rank = _get_sequence_parallel_rank
get_model_parallel_world_size = get_tensor_model_parallel_world_size = _get_model_parallel_world_size

__getattr__ = missing(__name__)
