"""``deepspeed.comm.comm``: torch's collectives on torch's default group, and questions about the launch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ds_hf.deepspeed_api.accelerator import get_accelerator
from ds_hf.engine.comm.comms_logger import (
    CommsLogger,
    comms_logger,
    configure,
    get_comm_operation_count,
    get_logged_comm_ops,
    has_comm_data,
    log_summary,
    reset_log,
    timed,
)
from ds_hf.deepspeed_api.collectives import (
    all_gather,
    all_gather_into_tensor,
    all_gather_object,
    all_reduce,
    all_to_all_single,
    barrier,
    broadcast,
    broadcast_object_list,
    gather,
    irecv,
    isend,
    monitored_barrier,
    recv,
    reduce,
    reduce_scatter,
    reduce_scatter_tensor,
    scatter,
    send,
)
from ds_hf.engine.comm.process_group import (
    ProcessGroup,
    ReduceOp,
    destroy_process_group,
    get_global_rank,
    get_local_rank,
    get_rank,
    get_world_group,
    get_world_size,
    init_distributed,
    is_available,
    is_initialized,
    new_group,
)

__all__ = [
    "CommsLogger",
    "P2POp",
    "ProcessGroup",
    "ReduceOp",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "allgather_fn",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "comms_logger",
    "configure",
    "destroy_process_group",
    "gather",
    "get_all_ranks_from_group",
    "get_comm_operation_count",
    "get_global_rank",
    "get_local_rank",
    "get_local_rank_from_launcher",
    "get_logged_comm_ops",
    "get_rank",
    "get_world_group",
    "get_world_rank_from_launcher",
    "get_world_size",
    "get_world_size_from_launcher",
    "has_all_gather_into_tensor",
    "has_all_reduce_coalesced",
    "has_coalescing_manager",
    "has_comm_data",
    "has_reduce_scatter_tensor",
    "inference_all_reduce",
    "init_distributed",
    "initialize_mesh_device",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "log_summary",
    "monitored_barrier",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_fn",
    "reduce_scatter_tensor",
    "reset_log",
    "scatter",
    "send",
]


all_to_all = timed(dist.all_to_all, "input_tensor_list")
batch_isend_irecv = timed(dist.batch_isend_irecv, "p2p_op_list")


class _All:
    """Several requests that are waited for together."""

    def __init__(self, works: Sequence[Any]) -> None:
        self.works = works

    def wait(self) -> None:
        """Wait for all of them."""
        for work in self.works:
            work.wait()


@partial(timed, sized="tensors")
def all_reduce_coalesced(
    tensors: Sequence[Tensor], op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> _All | None:
    """All-reduce each tensor, in place."""
    return _finished([dist.all_reduce(tensor, op=op, group=group, async_op=True) for tensor in tensors], async_op)


def all_gather_coalesced(
    output_tensors: Sequence[Tensor], input_tensors: Sequence[Tensor], group: Any = None, async_op: bool = False
) -> _All | None:
    """All-gather each input into its flat output."""
    pairs = zip(output_tensors, input_tensors, strict=True)
    return _finished([dist.all_gather_into_tensor(o, i, group=group, async_op=True) for o, i in pairs], async_op)


def _finished(works: list[Any], async_op: bool) -> _All | None:
    together = _All(works)
    if async_op:
        return together
    together.wait()
    return None


@partial(timed, sized="tensor")
def inference_all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> Tensor:
    """All-reduce in place; the tensor."""
    dist.all_reduce(tensor, op=op, group=group)
    return tensor


def allgather_fn(
    output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False, debug: Any = None
) -> Any:
    """All-gather into one flat tensor."""
    return all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


def reduce_scatter_fn(
    output_tensor: Tensor,
    tensor: Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    debug: Any = None,
) -> Any:
    """Reduce-scatter of one flat tensor."""
    return reduce_scatter_tensor(output_tensor, tensor, op=op, group=group, async_op=async_op, prof=prof)


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """Global ranks of the group's members, in its order."""
    return list(dist.get_process_group_ranks(group))


def initialize_mesh_device(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> DeviceMesh:
    """A torch device mesh over all processes."""
    kind = torch.device(get_accelerator().device_name()).type
    return init_device_mesh(kind, tuple(mesh_shape), mesh_dim_names=tuple(mesh_dim_names))


def has_all_gather_into_tensor() -> bool:
    """Every torch that ds_hf runs on has it."""
    return True


has_reduce_scatter_tensor = has_all_reduce_coalesced = has_coalescing_manager = has_all_gather_into_tensor


def get_world_size_from_launcher() -> int:
    """WORLD_SIZE as the launcher set it; -1 without."""
    return int(os.environ.get("WORLD_SIZE") or -1)


def get_world_rank_from_launcher() -> int:
    """RANK as the launcher set it; -1 without."""
    return int(os.environ.get("RANK") or -1)


def get_local_rank_from_launcher() -> int:
    """LOCAL_RANK as the launcher set it; 0 without."""
    return get_local_rank()
