"""The process groups of the engine that was made last; before that, all processes: ``deepspeed.utils.groups``."""

from __future__ import annotations

from ds_hf.config.mesh import MeshShape
from ds_hf.deepspeed_api.sequence import parallel_state
from ds_hf.engine.comm.mesh import Axis, Mesh, axis_of
from ds_hf.engine.comm.process_group import ProcessGroup, get_rank, get_world_group, get_world_size

_latest: Mesh | None = None


def remember(mesh: Mesh) -> None:
    """The functions below answer for ``mesh`` from now on. DeepSpeed's functions take no engine. Collective."""
    global _latest
    _latest = mesh
    if mesh.shape.sequence > 1:
        mesh.axis("sequence"), mesh.axis("data")  # made here, where all processes are


def _data() -> Axis | None:
    """The processes that read different samples; ``None`` where it is all processes: torch's own group, which may have
    been made anew since."""
    if _latest is not None and _latest.shape.sequence > 1:
        return _latest.axis("data")
    return None if _latest is None or _latest.replicas.group is None else _latest.replicas


def _tensor() -> Axis | None:
    return None if _latest is None or _latest.shape.tensor == 1 else _latest.axis("tensor")


def _get_data_parallel_group() -> ProcessGroup:
    axis = _data()
    return get_world_group() if axis is None or axis.group is None else axis.group


def _get_data_parallel_world_size() -> int:
    axis = _data()
    return get_world_size() if axis is None else axis.world_size


def _get_data_parallel_rank() -> int:
    axis = _data()
    return get_rank() if axis is None else axis.rank


def get_tensor_model_parallel_group() -> ProcessGroup:
    axis = _tensor()
    assert axis is not None, "intra_layer_model parallel group is not initialized"
    return get_world_group() if axis.group is None else axis.group


def get_tensor_model_parallel_src_rank() -> int:
    """Global rank of the first process of this one's tensor-parallel group."""
    axis = _tensor()
    return get_rank() if axis is None else axis.global_rank(0)


def _init_tp_mesh_device(
    tensor_model_parallel_size: int = 1, data_parallel_size: int | None = None
) -> tuple[ProcessGroup, ProcessGroup] | None:
    """Make the data-parallel and tensor-parallel groups before there is an engine. Collective; ``None`` where some
    exist already."""
    if _tensor() is not None or tensor_model_parallel_size == 1:
        return None
    shape = MeshShape(
        data=data_parallel_size or get_world_size() // tensor_model_parallel_size, tensor=tensor_model_parallel_size
    )
    mesh = Mesh(shape)
    _ = mesh.replicas, mesh.axis("tensor")  # all processes make both groups now
    remember(mesh)
    return _get_data_parallel_group(), get_tensor_model_parallel_group()


def _get_model_parallel_world_size() -> int:
    axis = _tensor()
    return 1 if axis is None else axis.world_size


def get_model_parallel_rank() -> int:
    axis = _tensor()
    return 0 if axis is None else axis.rank


def _get_zero_param_intra_parallel_group() -> ProcessGroup | None:
    """The neighbours that gather parameters from each other; ``None`` where all processes do."""
    axis = None if _latest is None else _latest.inner
    return None if axis is None else axis.group


def _sequence() -> Axis | None:
    """The processes that share sequences with this one; ``None`` where they are whole."""
    if _latest is not None and _latest.shape.sequence > 1:
        return _latest.axis("sequence")
    if parallel_state.is_initialized():  # before there is an engine
        return axis_of(parallel_state.get_sequence_parallel_group(), "sequence")
    return None


def averages_sequence() -> bool:
    """Whether the latest engine averages gradients over the processes of a sequence."""
    return _latest is not None and _latest.shape.sequence > 1 and not _latest.sums_sequence


def _get_sequence_parallel_world_size() -> int:
    axis = _sequence()
    return 1 if axis is None else axis.world_size


def _get_sequence_parallel_rank() -> int:
    axis = _sequence()
    return 0 if axis is None else axis.rank


def _get_sequence_parallel_group() -> ProcessGroup:
    """The processes that share sequences with this one.

    Raises:
        KeyError: sequences are whole.
    """
    axis = _sequence()
    if axis is None:
        raise KeyError("No sequence parallel group found")
    return get_world_group() if axis.group is None else axis.group


def _replicas() -> Axis | None:
    return None if _latest is None or _latest.replicas.group is None else _latest.replicas


def _get_sequence_data_parallel_group() -> ProcessGroup:
    """The processes over which gradients are reduced and states divided."""
    axis = _replicas()
    return get_world_group() if axis is None or axis.group is None else axis.group


def _get_sequence_data_parallel_world_size() -> int:
    axis = _replicas()
    return get_world_size() if axis is None else axis.world_size


def _get_sequence_data_parallel_rank() -> int:
    axis = _replicas()
    return get_rank() if axis is None else axis.rank


get_data_parallel_group = _get_data_parallel_group
get_data_parallel_rank = _get_data_parallel_rank
get_data_parallel_world_size = _get_data_parallel_world_size
get_tensor_model_parallel_rank = get_model_parallel_rank
get_model_parallel_group = get_tensor_model_parallel_group
get_model_parallel_world_size = get_tensor_model_parallel_world_size = _get_model_parallel_world_size
