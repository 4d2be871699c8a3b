"""torch's collectives, which may be called as DeepSpeed's are: with its names of arguments, and its profiling ones."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ds_hf.engine.comm import process_group
from ds_hf.engine.comm.comms_logger import timed

__all__ = [
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "irecv",
    "isend",
    "monitored_barrier",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
]

all_gather = timed(process_group.all_gather, "tensor")
all_gather_object = timed(process_group.all_gather_object)
all_reduce = timed(process_group.all_reduce, "tensor")
all_to_all_single = timed(process_group.all_to_all_single, "input", tensor="input")
barrier = timed(process_group.barrier)
broadcast = timed(process_group.broadcast, "tensor")
broadcast_object_list = timed(process_group.broadcast_object_list)
gather = timed(process_group.gather, "tensor")
irecv = timed(process_group.irecv, "tensor")
isend = timed(process_group.isend, "tensor")
monitored_barrier = timed(process_group.monitored_barrier)
recv = timed(process_group.recv, "tensor")
reduce = timed(process_group.reduce, "tensor")
reduce_scatter = timed(process_group.reduce_scatter, "input_list", tensor_list="input_list")
reduce_scatter_tensor = timed(process_group.reduce_scatter_tensor, "input", output_tensor="output", tensor="input")
scatter = timed(process_group.scatter, "tensor")
send = timed(process_group.send, "tensor")


def _all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
) -> Any:
    whole = input_tensor if input_tensor.dim() else input_tensor.reshape(1)  # gloo, unlike NCCL, asks for a dimension
    return process_group.all_gather_into_tensor(output_tensor, whole, group=group, async_op=async_op)


_all_gather_into_tensor.__name__ = "all_gather_into_tensor"  # in what is logged
all_gather_into_tensor = timed(_all_gather_into_tensor, "input_tensor", tensor="input_tensor")
