"""The process groups of an ``mpu``: an object or a module with functions such as Megatron's ``parallel_state``.

Its sizes are read in ``config/mesh.py``. The groups have to form a grid: each data-parallel group crosses each
model-parallel group in one process. Only then is every element of the model's states owned once, and the batch of the
model-parallel processes the same.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ds_hf.config.types.mesh import MeshShape
from ds_hf.errors import ConfigError

__all__ = ["check_groups"]

_KINDS = ("tensor_model_parallel", "slice_parallel", "model_parallel")  # the same group, the narrower name first


def check_groups(mpu: Any, shape: MeshShape) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The data-parallel and the tensor-parallel group of this process. Collective: all processes see all faults.

    Raises:
        ConfigError: on all processes, where the groups of one do not form the grid that ``shape`` says.
    """
    me = dist.get_rank()
    data_group, tensor_group = mpu.get_data_parallel_group(), _tensor_group(mpu)
    data, tensor = _ranks(data_group), _ranks(tensor_group) if tensor_group is not None else []
    fault = _local_fault(mpu, shape, me, data, tensor)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (fault, data, tensor))
    faults = [f"rank {rank}: {told}" for rank, (told, _, _) in enumerate(every) if told]
    if not faults:
        places = {rank: (data.index(rank), tensor.index(rank)) for rank, (_, data, tensor) in enumerate(every)}
        for rank, (_, data, tensor) in enumerate(every):
            same_part = all(places[other][1] == places[rank][1] for other in data)
            same_data = all(places[other][0] == places[rank][0] for other in tensor)
            if not (same_part and same_data):
                faults.append(f"rank {rank}: its groups {data} and {tensor} are no row and column of one grid")
    if faults:
        more = f"; {len(faults) - 4} more ranks" if len(faults) > 4 else ""
        raise ConfigError(f"the groups of the mpu do not form a mesh: {'; '.join(faults[:4])}{more}", _WHERE)
    assert tensor_group is not None
    return data_group, tensor_group


_WHERE = "initialize(mpu=...)"


def _local_fault(mpu: Any, shape: MeshShape, me: int, data: list[int], tensor: list[int]) -> str:
    if not tensor:
        names = " or ".join(f"get_{kind}_group()" for kind in _KINDS)
        return f"it has no {names}, and its model-parallel size is {shape.tensor}"
    for name, ranks, size in (("data", data, shape.data), ("model", tensor, shape.tensor)):
        if len(ranks) != size:
            return f"its {name}-parallel group is {ranks}, and there have to be {size}"
        if me not in ranks:
            return f"its {name}-parallel group is {ranks}, without itself"
    if set(data) & set(tensor) != {me}:
        return f"its data-parallel group {data} and its model-parallel group {tensor} share other processes"
    for kind in _KINDS:
        rank = _call(mpu, f"get_{kind}_rank")
        if rank not in (None, tensor.index(me)):
            return f"mpu.get_{kind}_rank() is {rank}, and its place in the group {tensor} is {tensor.index(me)}"
    return ""


def _tensor_group(mpu: Any) -> dist.ProcessGroup | None:
    groups = (_call(mpu, f"get_{kind}_group") for kind in _KINDS)
    return next((group for group in groups if group is not None), None)


def _call(mpu: Any, name: str) -> Any:
    """What the function says, ``None`` where there is none or its group was never made (Megatron asserts)."""
    function = getattr(mpu, name, None)
    try:
        return function() if callable(function) else None
    except AssertionError:
        return None


def _ranks(group: dist.ProcessGroup | None) -> list[int]:
    return dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
