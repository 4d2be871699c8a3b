"""Sending between neighbouring stages by hand: ``deepspeed.runtime.pipe.p2p``.

The functions take no engine, so the grid that ``init_process_groups`` was given last is the process's.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hf.engine.parallel.pipeline.grid import PipelineParallelGrid
from ds_hf.errors import PipelineError

__all__ = ["can_send_recv", "init_process_groups", "recv", "recv_obj", "send", "send_obj", "wait"]

_grid: PipelineParallelGrid | None = None


def can_send_recv() -> bool:
    """Whether torch sends between two processes: yes."""
    return True


def init_process_groups(grid: PipelineParallelGrid) -> None:
    """``send`` and ``recv`` count stages of ``grid`` from now on.

    Raises:
        PipelineError: it has one stage.
    """
    global _grid
    if grid.pipe_parallel_size < 2:
        raise PipelineError("there is one stage: nothing is sent")
    _grid = grid


def send(tensor: Tensor, dest_stage: int, async_op: bool = False) -> None:
    """Send to the process at this one's place in a neighbouring stage; returns when it is on its way."""
    dist.send(tensor, _rank_in(dest_stage, async_op))


def recv(tensor: Tensor, src_stage: int, async_op: bool = False) -> int:
    """Receive from the process at this one's place in a neighbouring stage, into ``tensor``."""
    return int(dist.recv(tensor, _rank_in(src_stage, async_op)))


def wait() -> None:
    """Wait for the device. What was sent and received has been waited for."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def send_obj(msg: Any, dest: int) -> None:
    """Send an object that pickle takes to the process with global rank ``dest``."""
    content = torch.frombuffer(bytearray(pickle.dumps(msg)), dtype=torch.uint8)
    device = _device()
    dist.send(torch.tensor([content.numel()], device=device), dest)
    dist.send(content.to(device), dest)


def recv_obj(sender: int) -> Any:
    """The object that the process with global rank ``sender`` sends."""
    device = _device()
    length = torch.zeros(1, dtype=torch.int64, device=device)
    dist.recv(length, sender)
    content = torch.empty(int(length), dtype=torch.uint8, device=device)
    dist.recv(content, sender)
    return pickle.loads(content.cpu().numpy().tobytes())


def _device() -> torch.device:
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def _rank_in(stage: int, async_op: bool) -> int:
    if _grid is None:
        raise PipelineError("call init_process_groups(grid) first")
    if async_op:
        raise PipelineError("async_op=True is not supported: take torch.distributed.isend and irecv")
    stages, here = _grid.pipe_parallel_size, _grid.stage_id
    if not 0 <= stage < stages or (stage - here) % stages not in (1, stages - 1):
        raise PipelineError(f"stage {stage} is no neighbour of stage {here} of {stages}")
    return _grid.stage_to_global(stage)
