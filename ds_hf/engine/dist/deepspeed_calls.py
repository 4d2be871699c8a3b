"""torch's collectives, which may be called as DeepSpeed's are: with its names of two arguments, and its profiling ones.

``prof``, ``log_name`` and ``debug`` choose what DeepSpeed's own logger of collectives writes, which is not here; they
change nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ds_hf.engine.dist import process_group

__all__ = [
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "broadcast",
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

_PROFILING = ("prof", "log_name", "debug")


def _as_deepspeed(function: Callable[..., Any], **renamed: str) -> Callable[..., Any]:
    """``function`` under both sets of names; ``renamed`` gives torch's name for each of DeepSpeed's."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name in _PROFILING:
            kwargs.pop(name, None)
        for theirs, ours in renamed.items():
            if theirs in kwargs:
                kwargs[ours] = kwargs.pop(theirs)
        return function(*args, **kwargs)

    return call


all_gather = _as_deepspeed(process_group.all_gather)
all_gather_into_tensor = _as_deepspeed(process_group.all_gather_into_tensor, tensor="input_tensor")
all_gather_object = _as_deepspeed(process_group.all_gather_object)
all_reduce = _as_deepspeed(process_group.all_reduce)
all_to_all_single = _as_deepspeed(process_group.all_to_all_single, tensor="input")
barrier = _as_deepspeed(process_group.barrier)
broadcast = _as_deepspeed(process_group.broadcast)
gather = _as_deepspeed(process_group.gather)
irecv = _as_deepspeed(process_group.irecv)
isend = _as_deepspeed(process_group.isend)
monitored_barrier = _as_deepspeed(process_group.monitored_barrier)
recv = _as_deepspeed(process_group.recv)
reduce = _as_deepspeed(process_group.reduce)
reduce_scatter = _as_deepspeed(process_group.reduce_scatter, tensor_list="input_list")
reduce_scatter_tensor = _as_deepspeed(process_group.reduce_scatter_tensor, output_tensor="output", tensor="input")
scatter = _as_deepspeed(process_group.scatter)
send = _as_deepspeed(process_group.send)
