"""Tensor parallelism across hosts works, and is slow: it is said once, with what the link gives."""

from __future__ import annotations

import platform
import time
from typing import Any

import torch
import torch.distributed as dist

from ds_hf.engine.comm import collectives
from ds_hf.engine.comm.mesh import Axis, compute_device
from ds_hf.log import warn_once

__all__ = ["all_reduce_speed", "warn_across_hosts"]

_NBYTES, _ROUNDS = 4 << 20, 3


def warn_across_hosts(axis: Axis) -> None:
    """Warn where the processes of ``axis`` are on several hosts. Collective."""
    hosts: list[Any] = [None] * axis.world_size
    dist.all_gather_object(hosts, platform.node(), group=axis.group)
    names = list(dict.fromkeys(hosts))
    if len(names) == 1:
        return
    speed = all_reduce_speed(axis)
    here = max(hosts.count(name) for name in names)
    warn_once(
        f"ranks {axis.global_rank(0)} to {axis.global_rank(axis.world_size - 1)} share layers and are on "
        f"{len(names)} hosts ({', '.join(names[:4])}): every block sums its activations over the network four times a "
        f"micro-batch, at {speed / 1e9:.2f} GB/s as measured now. A tensor-parallel size of {here} or less stays "
        "inside a host, where ranks are numbered host by host"
    )


def all_reduce_speed(axis: Axis) -> float:
    """Bytes a second of a sum of 4 MiB over ``axis``, counted once. Collective."""
    tensor = torch.zeros(_NBYTES // 4, device=compute_device())
    collectives.all_reduce_sum(tensor, axis, "the speed of a link")
    _finish(tensor)
    start = time.perf_counter()
    for _ in range(_ROUNDS):
        collectives.all_reduce_sum(tensor, axis, "the speed of a link")
    _finish(tensor)
    return _ROUNDS * _NBYTES / (time.perf_counter() - start)


def _finish(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()
