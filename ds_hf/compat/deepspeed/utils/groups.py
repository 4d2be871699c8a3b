"""``deepspeed.utils.groups``: the process groups of the engine that was made last; before that, all processes."""

from __future__ import annotations

from ds_hf.engine.dist.mesh import Axis, Mesh
from ds_hf.engine.dist.process_group import ProcessGroup, get_rank, get_world_group, get_world_size

from .._missing import missing


def _data() -> Axis | None:
    """``None`` where it is all processes: torch's own group, which may have been made anew since."""
    return None if Mesh.latest is None or Mesh.latest.replicas.group is None else Mesh.latest.replicas


def _tensor() -> Axis | None:
    return None if Mesh.latest is None or Mesh.latest.shape.tensor == 1 else Mesh.latest.axis("tensor")


def _get_data_parallel_group() -> ProcessGroup:
    axis = _data()
    return get_world_group() if axis is None or axis.group is None else axis.group


def _get_data_parallel_world_size() -> int:
    axis = _data()
    return get_world_size() if axis is None else axis.world_size


def _get_data_parallel_rank() -> int:
    axis = _data()
    return get_rank() if axis is None else axis.rank


def _get_model_parallel_world_size() -> int:
    axis = _tensor()
    return 1 if axis is None else axis.world_size


def get_model_parallel_rank() -> int:
    axis = _tensor()
    return 0 if axis is None else axis.rank


def _get_sequence_parallel_world_size() -> int:
    return 1


def _get_sequence_parallel_rank() -> int:
    return 0


get_data_parallel_group = _get_data_parallel_group
get_data_parallel_rank = _get_data_parallel_rank
get_data_parallel_world_size = _get_data_parallel_world_size
get_tensor_model_parallel_rank = get_model_parallel_rank
get_model_parallel_world_size = get_tensor_model_parallel_world_size = _get_model_parallel_world_size

__getattr__ = missing(__name__)
