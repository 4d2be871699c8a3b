"""Axes of the process mesh. For now there is one: the data-parallel axis over which model states are sharded.

Invariant: an ``Axis`` is only made once the process group exists; its ``rank`` counts along the axis, not globally.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Axis", "compute_device", "data_parallel_axis"]


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh.

    Attributes:
        group: the process group, ``None`` for torch's default group.
        rank: this process's position along the axis.
        world_size: number of processes along the axis.
    """

    group: dist.ProcessGroup | None
    rank: int
    world_size: int

    def global_rank(self, rank: int) -> int:
        """Global rank of the process at position ``rank`` of this axis."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def axis_rank(self, rank: int) -> int:
        """Position along this axis of the process with global rank ``rank``.

        Raises:
            ValueError: that process is not on this axis.
        """
        return rank if self.group is None else dist.get_group_rank(self.group, rank)


def data_parallel_axis(mpu: Any = None, group: dist.ProcessGroup | None = None) -> Axis:
    """The data-parallel axis: ``group``, or that of a Megatron-style ``mpu``, or all processes."""
    if group is None and mpu is not None:
        group = mpu.get_data_parallel_group()
    return Axis(group, dist.get_rank(group), dist.get_world_size(group))


def compute_device() -> torch.device:
    """Where this process computes: its CUDA device (``LOCAL_RANK`` picks it if none was set), or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "-1"))
    if local_rank >= 0 and torch.cuda.current_device() == 0 and local_rank < torch.cuda.device_count():
        torch.cuda.set_device(local_rank)
    return torch.device("cuda", torch.cuda.current_device())
