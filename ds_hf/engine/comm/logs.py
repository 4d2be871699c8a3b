"""The logs of this process: one for each process group, whoever makes engines on it, and the watches over them.

A log lives as long as its group. There is one watch for all processes that train together, over the logs of all their
axes: a process that others wait for in one axis may itself be waiting in another.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from ds_hf.engine.comm.log import CollectiveLog, open_board
from ds_hf.engine.comm.watch import Watch

__all__ = ["Logs", "group_timeout"]


class Logs:
    """Logs by process group, and who watches them."""

    def __init__(self) -> None:
        self._logs: WeakKeyDictionary[dist.ProcessGroup, CollectiveLog] = WeakKeyDictionary()
        # Names of groups come again after torch's default group was destroyed and made anew, maybe in the same store.
        self._worlds: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
        self._numbers = itertools.count()
        self._watches: list[Watch] = []

    def of(self, group: dist.ProcessGroup | None, name: str = "") -> CollectiveLog:
        """The log of ``group``, by default of all processes. All processes of the group call it first together.

        Args:
            name: what reports call the axis; the first name given stays.
        """
        key = dist.group.WORLD if group is None else group
        assert key is not None
        if key not in self._logs:
            self._logs[key] = self._made(key)
        log = self._logs[key]
        log.name = log.name or name
        return log

    def _made(self, group: dist.ProcessGroup) -> CollectiveLog:
        world = dist.group.WORLD
        assert world is not None
        if world not in self._worlds:
            self._worlds[world] = next(self._numbers)
        ranks = dist.get_process_group_ranks(group)
        log = CollectiveLog(ranks, key=f"{self._worlds[world]}/{group.group_name}/{ranks[0]}")
        if len(ranks) > 1:
            log.store = store = PrefixStore(f"ds_hf/{log.key}", _get_default_store())
            with contextlib.suppress(RuntimeError):  # a store that cannot do it: no board then
                log.board = open_board(store, dist.get_rank(group), len(ranks))
            for watch in self._watches:
                watch.take_in(log)
        return log

    def watch(self, log: CollectiveLog, timeout: float) -> None:
        """Watch ``log`` and those of all groups of its processes, now and later; 0 for no watch. All processes of the
        log call it; a second call sets the time of the watch that is there."""
        if log.watch is not None:
            log.watch.timeout = timeout or float("inf")
        elif timeout and log.store is not None:
            with contextlib.suppress(RuntimeError):  # a store that has no second connection
                connection: Any = log.store
                watch = Watch(connection.clone(), dist.get_rank(), log.ranks, timeout)
                self._watches = [each for each in self._watches if each.lives] + [watch]
                for each in [log, *self._logs.values()]:
                    watch.take_in(each)
                watch.start()


def group_timeout(group: dist.ProcessGroup | None) -> float:
    """Seconds that torch lets a collective of the group take."""
    key = dist.group.WORLD if group is None else group
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    try:
        return float(key._get_backend(device).options._timeout.total_seconds())  # type: ignore[union-attr]
    except (AttributeError, RuntimeError):  # a backend of somebody else's
        return dist.default_pg_timeout.total_seconds()
