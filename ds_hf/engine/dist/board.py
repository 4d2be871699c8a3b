"""A few kilobytes of memory that the ranks of one host share: what each of them issues, collective by collective.

A rank notes a collective before it issues it, and compares it with what its neighbours noted for the same place. The
later of two ranks that differ sees it, before its call could abort the process (gloo, other size), mix up weights
(NCCL, same size) or hang. One write and two reads of memory, about a microsecond.

Invariant: a row is written by its rank only, the entry before the count.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import Store

__all__ = ["Board", "open_board"]

LENGTH = 4096  # entries of a row, a power of two: how far ranks may be apart
_ROW = LENGTH + 8  # the count has a cache line of its own


class Board:
    """Rows of the ranks of this host.

    Args:
        memory: ``len(ranks)`` rows of 8-byte integers.
        ranks: places on the axis of those on this host, in the order of their rows.
        rank: this process.
    """

    def __init__(self, memory: mmap.mmap, ranks: Sequence[int], rank: int) -> None:
        self._words = memoryview(memory).cast("q")
        self.ranks = tuple(ranks)
        row = ranks.index(rank)
        self._mine = row * _ROW
        around = {(row - 1) % len(ranks), (row + 1) % len(ranks)} - {row}
        self._neighbours = [(ranks[other], other * _ROW) for other in sorted(around)]

    def note(self, index: int, entry: int) -> int | None:
        """Note ``entry`` as this rank's collective number ``index`` (from 0).

        Returns:
            a rank that noted another entry there; ``None`` if none has.
        """
        words, place = self._words, 8 + (index & (LENGTH - 1))
        words[self._mine + place] = entry
        words[self._mine] = index + 1
        for rank, row in self._neighbours:
            if 0 < words[row] - index <= LENGTH and words[row + place] != entry:
                return rank
        return None


def open_board(store: Store, rank: int, world_size: int) -> Board | None:
    """The board of this host; ``None`` if this rank is alone on it or memory cannot be shared. All ranks call it."""
    store.set(f"host/{rank}", _host())
    hosts = _get_all(store, [f"host/{other}" for other in range(world_size)])
    ranks = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    if len(ranks) == 1:
        return None
    key, size = f"board/{ranks[0]}", len(ranks) * _ROW * 8
    folder = "/dev/shm" if Path("/dev/shm").is_dir() else None
    if rank == ranks[0]:
        path = ""
        with contextlib.suppress(OSError):
            descriptor, path = tempfile.mkstemp(prefix="ds_hf_", dir=folder)
            os.truncate(descriptor, size)
            os.close(descriptor)
        store.set(key, path)
    path = store.get(key).decode()
    memory = None
    with contextlib.suppress(OSError, ValueError), open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), size)
    store.set(f"{key}/{rank}", "mapped" if memory else "")
    mapped = _get_all(store, [f"{key}/{other}" for other in ranks])
    if rank == ranks[0]:
        with contextlib.suppress(OSError):
            os.unlink(path)  # the memory stays until the last rank has gone
    return Board(memory, ranks, rank) if memory is not None and all(mapped) else None


def _get_all(store: Store, keys: list[str]) -> list[bytes]:
    """Values of ``keys``, waiting for them; one message where the store can do that."""
    extended: Any = store  # torch's stub lacks the method
    return store.multi_get(keys) if extended.has_extended_api() else [store.get(key) for key in keys]


def _host() -> str:
    """What tells hosts apart, and containers of one host that share no memory."""
    shm = os.stat("/dev/shm").st_dev if os.path.isdir("/dev/shm") else 0
    return f"{platform.node()}/{shm}"
