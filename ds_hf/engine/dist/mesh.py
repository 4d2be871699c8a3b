"""Axes of the process mesh. For now there is one: the data-parallel axis over which model states are sharded.

Invariant: an ``Axis`` is only made once the process group exists; its ``rank`` counts along the axis, not globally.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from ds_hf.engine.dist.board import open_board
from ds_hf.engine.dist.log import CollectiveLog
from ds_hf.engine.dist.mpu import check_mpu
from ds_hf.engine.dist.watch import Watch

__all__ = ["Axis", "compute_device", "data_parallel_axis", "watch_for_hangs"]

# A log lives as long as its process group, whoever makes engines on it; the numbers keep their keys in the store apart.
_logs: WeakKeyDictionary[dist.ProcessGroup, CollectiveLog] = WeakKeyDictionary()
_log_numbers = itertools.count()


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh.

    Attributes:
        group: the process group, ``None`` for torch's default group.
        rank: this process's position along the axis.
        world_size: number of processes along the axis.
        log: what this process issued on the axis; one for all engines on the same group.
    """

    group: dist.ProcessGroup | None
    rank: int
    world_size: int
    log: CollectiveLog = field(default_factory=CollectiveLog, compare=False, repr=False)

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
    """The data-parallel axis: ``group``, or that of a Megatron-style ``mpu``, or all processes.

    Raises:
        ConfigError: ``mpu`` says that the model is parallel, too.
    """
    if mpu is not None:
        check_mpu(mpu)
        group = mpu.get_data_parallel_group() if group is None else group
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    key = dist.group.WORLD if group is None else group
    assert key is not None
    if key not in _logs:
        number = next(_log_numbers)
        _logs[key] = CollectiveLog(world_size)
        if world_size > 1:
            _logs[key].store = store = PrefixStore(
                f"ds_hf/{number}/{key.group_name}/{dist.get_global_rank(key, 0)}", _get_default_store()
            )
            with contextlib.suppress(RuntimeError):  # a store that cannot do it: no board then
                _logs[key].board = open_board(store, rank, world_size)
    return Axis(group, rank, world_size, _logs[key])


def watch_for_hangs(axis: Axis, timeout: float | None) -> None:
    """Have a thread report when ranks diverge, see ``watch``. All ranks call it; a second call sets the time.

    Args:
        timeout: seconds without progress after which a rank that others wait for is said to hang; ``None`` for nine
            tenths of the group's own timeout, so that the report comes before torch's; 0 for no watch.
    """
    log = axis.log
    if timeout is None:
        timeout = 0.9 * _group_timeout(axis.group)
    if log.watch is not None:
        log.watch.timeout = timeout or float("inf")
    elif timeout and log.store is not None:
        with contextlib.suppress(RuntimeError):  # a store that has no second connection
            connection: Any = log.store
            log.watch = Watch(log, connection.clone(), axis.rank, axis.world_size, timeout)


def _group_timeout(group: dist.ProcessGroup | None) -> float:
    """Seconds that torch lets a collective of the group take."""
    key = dist.group.WORLD if group is None else group
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    try:
        return float(key._get_backend(device).options._timeout.total_seconds())  # type: ignore[union-attr]
    except (AttributeError, RuntimeError):  # a backend of somebody else's
        return dist.default_pg_timeout.total_seconds()


def compute_device() -> torch.device:
    """Where this process computes: its CUDA device (``LOCAL_RANK`` picks it if none was set), or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "-1"))
    if local_rank >= 0 and torch.cuda.current_device() == 0 and local_rank < torch.cuda.device_count():
        torch.cuda.set_device(local_rank)
    return torch.device("cuda", torch.cuda.current_device())
