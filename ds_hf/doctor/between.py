"""Of ``ds-hf doctor``: the link between the processes of a launch, by their collectives.

Measured where ``torchrun`` or ``ds-hf run`` has started the doctor as several processes; else there is nothing to do.
"""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from ds_hf.measure.links import MeasuredLinks

__all__ = ["device_name", "measure_between", "rank", "started_as_several"]

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_MEET_S = 60
_SMALL, _LARGE = 1 << 18, 1 << 24  # values of fp32: of the link that is slow, of the one that is fast
_SLOW_S = 0.2  # a round of the small ones that takes longer is as good as a large one
_ROUNDS = 5
_PACKED = 1 << 22


def started_as_several() -> bool:
    """Whether a launcher has started this process beside others."""
    if any(not os.environ.get(name) for name in _VARIABLES):
        return False
    return os.environ["WORLD_SIZE"].isdecimal() and int(os.environ["WORLD_SIZE"]) > 1


def rank() -> int:
    """Of this process; 0 if it is alone."""
    return int(os.environ["RANK"]) if started_as_several() else 0


def device_name() -> str:
    """Of the device that would compute."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()


def measure_between() -> MeasuredLinks:
    """Time all-reduces of all processes, and blocks on the device. All of them call it.

    Raises:
        RuntimeError: they do not meet.
    """
    import torch
    import torch.distributed as dist

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=_MEET_S))
    try:
        names: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(names, socket.gethostname())
        latency = _seconds(dist.all_reduce, torch.zeros(1, device=device))
        numel = _SMALL
        seconds = _seconds(dist.all_reduce, torch.zeros(numel, device=device))
        if seconds < _SLOW_S:
            numel = _LARGE
            seconds = _seconds(dist.all_reduce, torch.zeros(numel, device=device))
        world = dist.get_world_size()
        sent = 2 * (world - 1) / world * 4 * numel  # of a ring
        packed = _PACKED / _seconds(_there_and_back(), torch.ones(1, _PACKED, device=device))
        return MeasuredLinks(
            device_name(),
            between=sent / seconds,
            processes=world,
            hosts=len(set(names)),
            backend=backend,
            latency=latency,
            packed=packed,
        )
    finally:
        dist.destroy_process_group()


def _there_and_back() -> Callable[[Any], Any]:
    from ds_hf.engine.ops.blocks import BlockFormat

    form = BlockFormat(8)
    return lambda values: form.read(form.write(values), values)


def _seconds(call: Callable[[Any], Any], values: Any) -> float:
    """The median of a few rounds after the first, the longest over processes, so that all say the same."""
    import torch
    import torch.distributed as dist

    rounds = []
    for _ in range(_ROUNDS + 1):
        dist.barrier()
        if values.is_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        call(values)
        if values.is_cuda:
            torch.cuda.synchronize()
        rounds.append(time.perf_counter() - start)
    longest = torch.tensor(sorted(rounds[1:])[_ROUNDS // 2], device=values.device, dtype=torch.float64)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return max(longest.item(), 1e-9)
