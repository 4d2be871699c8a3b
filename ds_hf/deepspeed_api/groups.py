"""The process groups of the engine that was made last; before that, all processes: ``deepspeed.utils.groups``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from ds_hf.config.mesh import MeshShape
from ds_hf.deepspeed_api.sequence import parallel_state
from ds_hf.engine.comm.mesh import Axis, Mesh, axis_of
from ds_hf.engine.comm.process_group import ProcessGroup, get_rank, get_world_group, get_world_size

latest: Mesh | None = None  # ``initialize`` writes it: DeepSpeed's functions take no engine
# By name; and of which mesh they are: those of an engine before it are not meant.
_experts: dict[str, tuple[Axis, Axis]] = {}
_experts_of: Mesh | None = None


def make_groups(expert_sizes: Iterable[int] = ()) -> None:
    """Make here, where all processes are, what some of the functions below answer with. Collective.

    Args:
        expert_sizes: over how many processes layers divide their experts.
    """
    mesh = current_mesh()
    if mesh.shape.sequence > 1:
        mesh.axis("sequence"), mesh.axis("data")
    for size in sorted({*expert_sizes, mesh.shape.expert} if mesh.shape.expert > 1 else expert_sizes):
        with contextlib.suppress(ValueError):  # groups of an mpu; then no layer is divided
            _experts_here()[f"ep_size_{size}"] = mesh.experts_over(size)


def _experts_here() -> dict[str, tuple[Axis, Axis]]:
    global _experts, _experts_of
    if _experts_of is not latest:
        _experts, _experts_of = {}, latest
    return _experts


def current_mesh() -> Mesh:
    """That of the latest engine; before there is one, all processes as replicas."""
    global latest
    if latest is None:
        latest = Mesh(MeshShape(data=get_world_size()))
    return latest


def _data() -> Axis | None:
    """The processes that read different samples; ``None`` where it is all processes: torch's own group, which may have
    been made anew since."""
    if latest is not None and latest.shape.sequence > 1:
        return latest.axis("data")
    return None if latest is None or latest.replicas.group is None else latest.replicas


def _tensor() -> Axis | None:
    return None if latest is None or latest.shape.tensor == 1 else latest.axis("tensor")


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
    global latest
    latest = mesh = Mesh(shape)
    _ = mesh.replicas, mesh.axis("tensor")  # all processes make both groups now
    return _get_data_parallel_group(), get_tensor_model_parallel_group()


def _get_model_parallel_world_size() -> int:
    axis = _tensor()
    return 1 if axis is None else axis.world_size


def get_model_parallel_rank() -> int:
    axis = _tensor()
    return 0 if axis is None else axis.rank


def _get_zero_param_intra_parallel_group() -> ProcessGroup | None:
    """The neighbours that gather parameters from each other; ``None`` where all processes do."""
    axis = None if latest is None else latest.inner
    return None if axis is None else axis.group


def _sequence() -> Axis | None:
    """The processes that share sequences with this one; ``None`` where they are whole."""
    if latest is not None and latest.shape.sequence > 1:
        return latest.axis("sequence")
    if parallel_state.is_initialized():  # before there is an engine
        return axis_of(parallel_state.get_sequence_parallel_group(), "sequence")
    return None


def averages_sequence() -> bool:
    """Whether the latest engine averages gradients over the processes of a sequence."""
    return latest is not None and latest.shape.sequence > 1 and not latest.sums_sequence


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
    return None if latest is None or latest.replicas.group is None else latest.replicas


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


def _create_expert_and_data_parallel(
    expert_parallel_size_: int, use_data_before_expert_parallel_: bool = False
) -> None:
    """Make the groups of experts that are divided over so many processes. Collective."""
    mesh = current_mesh()
    mesh.data_before_experts = mesh.data_before_experts or use_data_before_expert_parallel_
    _experts_here()[f"ep_size_{expert_parallel_size_}"] = mesh.experts_over(expert_parallel_size_)


def _group_of(axis: Axis) -> ProcessGroup:
    return get_world_group() if axis.group is None else axis.group


def _named(group_name: str, kind: str) -> tuple[Axis, Axis]:
    assert group_name in _experts_here(), f"{kind} group is not initialized: there is no {group_name}"
    return _experts_here()[group_name]


def _get_expert_parallel_group(group_name: str) -> ProcessGroup:
    """The processes that divide the experts of layers of the name: ``ep_size_N`` for ``MoE(ep_size=N)``."""
    return _group_of(_named(group_name, "expert parallel")[0])


def _get_expert_parallel_group_dict() -> dict[str, ProcessGroup]:
    return {name: _group_of(parts) for name, (parts, _) in _experts_here().items()}


def _get_expert_parallel_group_ranks(group_name: str) -> list[int]:
    return _ranks(_named(group_name, "expert parallel")[0])


def _get_expert_parallel_world_size(group_name: str) -> int:
    return _named(group_name, "expert parallel")[0].world_size


def _get_expert_parallel_rank(group_name: str) -> int:
    return _named(group_name, "expert parallel")[0].rank


def _get_expert_parallel_src_rank(group_name: str) -> int:
    """Global rank of the first of them."""
    return _named(group_name, "expert parallel")[0].global_rank(0)


def _get_expert_data_parallel_group(group_name: str) -> ProcessGroup:
    """The processes that hold the same experts as this one, in layers of the name."""
    return _group_of(_named(group_name, "expert data parallel")[1])


def _get_expert_data_parallel_group_dict() -> dict[str, ProcessGroup]:
    return {name: _group_of(same) for name, (_, same) in _experts_here().items()}


def _get_expert_data_parallel_group_ranks(group_name: str) -> list[int]:
    return _ranks(_named(group_name, "expert data parallel")[1])


def _get_expert_data_parallel_world_size(group_name: str) -> int:
    return _named(group_name, "expert data parallel")[1].world_size


def _get_expert_data_parallel_rank(group_name: str) -> int:
    return _named(group_name, "expert data parallel")[1].rank


def _get_expert_broadcast_src_rank(group_name: str) -> int:
    """Global rank of the first process that holds the same experts."""
    return _named(group_name, "expert data parallel")[1].global_rank(0)


def _ranks(axis: Axis) -> list[int]:
    return [axis.global_rank(rank) for rank in range(axis.world_size)]


def _get_max_expert_size() -> int | None:
    """Over how many processes the most divided layer is; ``None`` without one."""
    return max((parts.world_size for parts, _ in _experts_here().values()), default=None)


def _get_max_expert_size_name() -> str:
    return f"ep_size_{_get_max_expert_size()}"


def _get_max_expert_parallel_group() -> ProcessGroup:
    return _get_expert_parallel_group(_get_max_expert_size_name())


def _get_expert_model_parallel_world_size() -> int:
    """Over how many processes each expert is divided: never over several."""
    return 1


get_data_parallel_group = _get_data_parallel_group
get_data_parallel_rank = _get_data_parallel_rank
get_data_parallel_world_size = _get_data_parallel_world_size
get_tensor_model_parallel_rank = get_model_parallel_rank
get_model_parallel_group = get_tensor_model_parallel_group
get_model_parallel_world_size = get_tensor_model_parallel_world_size = _get_model_parallel_world_size
