"""The process groups of an ``mpu``: an object or a module with functions such as Megatron's ``parallel_state``.

Its sizes are read in ``config/mesh.py``. The groups have to form a grid: each data-parallel group crosses each
model-parallel group in one process. Only then is every element of the model's states owned once, and the batch of the
model-parallel processes the same.
"""

from __future__ import annotations

from collections import defaultdict
from hashlib import blake2b
from typing import Any, NamedTuple

import torch.distributed as dist

from ds_hf.config.types.root import MeshShape
from ds_hf.errors import ConfigError

__all__ = ["check_groups", "check_same_groups"]

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
    # Lists of ranks stay here: those of all processes together would grow with the square of their number.
    place = None if fault else _Place(_digest(data), data.index(me), _digest(tensor), tensor.index(me))
    faults, places = _told_by_all(fault, place)
    if not faults:
        out_of_line = _out_of_line(places)
        if out_of_line:
            fault = f"its groups {data} and {tensor} do not cross in one grid" if me in out_of_line else ""
            faults, _ = _told_by_all(fault, place)
    if faults:
        more = f"; {len(faults) - 4} more ranks" if len(faults) > 4 else ""
        raise ConfigError(f"the groups of the mpu do not form a mesh: {'; '.join(faults[:4])}{more}", _WHERE)
    assert tensor_group is not None
    return data_group, tensor_group


def check_same_groups(mpu: Any, data: list[int], tensor: list[int]) -> None:
    """That an ``mpu`` beside a topology has its groups. Collective: all processes see all faults.

    Args:
        data, tensor: ranks of this process's groups in the topology.

    Raises:
        ConfigError: on all processes, where a group of one has other ranks.
    """
    wrong = []
    given, shared = _ranks(mpu.get_data_parallel_group()), _tensor_group(mpu)
    if given != data:
        wrong.append(f"its data-parallel group is {given}, and that of the topology {data}")
    # Old interfaces call all processes of one model, pipe x tensor, model-parallel: sizes have been compared before.
    if shared is not None and len(_ranks(shared)) == len(tensor) and _ranks(shared) != tensor:
        wrong.append(f"its model-parallel group is {_ranks(shared)}, and that of the topology {tensor}")
    faults, _ = _told_by_all("; ".join(wrong), None)
    if faults:
        more = f"; {len(faults) - 4} more ranks" if len(faults) > 4 else ""
        raise ConfigError(
            f"the mpu and the topology of the PipelineModule differ: {'; '.join(faults[:4])}{more}. Leave mpu= out, or "
            "make both of the same sizes and order of axes",
            _WHERE,
        )


class _Place(NamedTuple):
    """Where a process is in its two groups, which are told apart by digests of their ranks."""

    data_group: str
    data_rank: int
    tensor_group: str
    tensor_rank: int


def _digest(ranks: list[int]) -> str:
    return blake2b(repr(ranks).encode(), digest_size=12).hexdigest()


def _told_by_all(fault: str, place: _Place | None) -> tuple[list[str], list[_Place]]:
    """Faults of all processes, each with its rank, and their places. Collective."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (fault, place))
    return [f"rank {rank}: {told}" for rank, (told, _) in enumerate(every) if told], [where for _, where in every]


def _out_of_line(places: list[_Place]) -> set[int]:
    """Ranks of data-parallel groups that are not at one place in all model-parallel groups, or the other way round."""
    rows: dict[str, list[int]] = defaultdict(list)
    columns: dict[str, list[int]] = defaultdict(list)
    for rank, place in enumerate(places):
        rows[place.data_group].append(rank)
        columns[place.tensor_group].append(rank)
    found = set[int]()
    for ranks in rows.values():
        if len({places[rank].tensor_rank for rank in ranks}) > 1:
            found.update(ranks)
    for ranks in columns.values():
        if len({places[rank].data_rank for rank in ranks}) > 1:
            found.update(ranks)
    return found


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
