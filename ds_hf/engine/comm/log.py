"""What collectives this process issued on an axis, in order: its ranks have the same log in a healthy run.

``with log("all-gather", "weights of model.layers.3", tensor):`` around a collective notes it (about two microseconds)
and turns a failure of it, or a difference from another rank, into a ``DivergenceError`` that says where the ranks
parted. The rest of the work is done by the thread of ``watch``, and only when something is wrong.

``Board`` is a few kilobytes of memory that the ranks of one host share: what each of them issues, collective by
collective. A rank notes a collective before it issues it, and compares it with what its neighbours noted for the same
place. The later of two ranks that differ sees it, before its call could abort the process (gloo, other size), mix up
weights (NCCL, same size) or hang. One write and two reads of memory, about a microsecond. A row is written by its rank
only, the entry before the count.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Protocol
from zlib import crc32

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from ds_hf.engine.comm.comms_logger import comms_logger
from ds_hf.errors import DsHfError

__all__ = ["Board", "CollectiveLog", "Entry", "LogObserver", "LogWatch", "get_all", "open_board"]

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
    hosts = get_all(store, [f"host/{other}" for other in range(world_size)])
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
    mapped = get_all(store, [f"{key}/{other}" for other in ranks])
    if rank == ranks[0]:
        with contextlib.suppress(OSError):
            os.unlink(path)  # the memory stays until the last rank has gone
    return Board(memory, ranks, rank) if memory is not None and all(mapped) else None


def get_all(store: Store, keys: list[str]) -> list[bytes]:
    """Values of ``keys``, waiting for them; one message where the store can do that."""
    extended: Any = store  # torch's stub lacks the method
    return store.multi_get(keys) if extended.has_extended_api() else [store.get(key) for key in keys]


def _host() -> str:
    """What tells hosts apart, and containers of one host that share no memory."""
    shm = os.stat("/dev/shm").st_dev if os.path.isdir("/dev/shm") else 0
    return f"{platform.node()}/{shm}"


# -- the log -----------------------------------------------------------------------------------------------------------


KEPT = 512  # latest entries that a report can show
STRIDE = 256  # between the marks by which ranks of different hosts compare
_MASK = (1 << 62) - 1
_DEEPSPEED = {  # what DeepSpeed calls an operation, on a tensor or on an object
    ("all-gather", True): "all_gather_into_tensor",
    ("all-gather", False): "all_gather_object",
    ("reduce-scatter", True): "reduce_scatter_tensor",
    ("all-reduce", True): "all_reduce",
    ("all-reduce (max)", True): "all_reduce",
    ("broadcast", True): "broadcast",
    ("broadcast", False): "broadcast_object_list",
    ("barrier", False): "barrier",
    ("all-to-all", True): "all_to_all_single",
}


Entry = tuple[str, str, int, str]  # operation, on what, elements, dtype


class LogObserver(Protocol):
    """What hears of the collectives of a log."""

    def begin(self, log: CollectiveLog) -> None:
        """The latest of ``log.entries`` is being issued."""

    def end(self, log: CollectiveLog) -> None:
        """The call that issued it is over, or failed."""

    def waiting(self, log: CollectiveLog) -> AbstractContextManager[Any]:
        """Around the wait, later, for what the latest of ``log.entries`` is."""

    def awaiting(self, log: CollectiveLog, peer: int) -> AbstractContextManager[Any]:
        """Around the wait for a message of the process with global rank ``peer``."""


class LogWatch(Protocol):
    """What compares the logs of ranks and ends a run that diverged: ``watch.Watch``."""

    timeout: float
    logs: list[CollectiveLog]

    def take_in(self, log: CollectiveLog) -> None:
        """Watch ``log`` too."""

    def diverged(self, log: CollectiveLog) -> None:
        """Another rank noted another collective."""

    def failed(self, error: RuntimeError) -> None:
        """A collective raised ``error``."""


class CollectiveLog:
    """The log of one axis.

    Attributes:
        name: what the axis is called in a report, such as "data"; ``key``: what tells its group from all others, the
            same on its processes.
        ranks: global ranks of the processes on the axis, in order.
        count: collectives issued so far.
        entries: the latest ``KEPT`` of them.
        marks: digest of all entries before each multiple of ``STRIDE``.
        thread: which thread issued the last one.
        board: memory shared with the other ranks of the host, if any.
        store: where ranks meet; ``None`` for a single process.
        watch: who compares and reports, over all axes of the process; ``None`` until an engine starts it.
        before: called before each collective; may raise instead of it (``memory``).
        agreement: what ``memory`` keeps for the axis.
        groups: how many were made of its processes, or a part of them (``mesh``).
        exchanges: what an engine opened along the axis, a weak reference (``peer_exchanges``).
        observer: hears of each collective, ``None`` where nothing does.
        world_size: number of ranks on the axis.
        compared: all ranks have the same log.
        at: what this process is doing, for people; "" where the stack tells it.
    """

    compared = True
    at = ""

    def __init__(self, ranks: Sequence[int] = (0,), name: str = "", key: str = "") -> None:
        self.ranks, self.name, self.key = tuple(ranks), name, key
        self.world_size = len(self.ranks)
        self.board: Board | None = None
        self.store: Store | None = None
        self.count = 0
        self.entries: deque[Entry] = deque(maxlen=KEPT)
        self.marks: deque[tuple[int, int]] = deque(maxlen=64)
        self.digest = 0
        self.inside = False  # of the call that issues one, which on the CPU lasts as long as the collective
        self.thread = threading.get_ident()
        self.watch: LogWatch | None = None
        self.before: Callable[[], None] | None = None
        self.agreement: Any = None
        self.groups = 0
        self.exchanges: Any = None
        self.observer: LogObserver | None = None
        self._stop: Callable[[], None] | None = None
        self._known: dict[tuple[str, str, int, torch.dtype | None], tuple[Entry, int]] = {}
        _logs.add(self)

    def __call__(self, operation: str, what: str, tensor: Tensor | None = None) -> CollectiveLog:
        """Note a collective that is about to be issued.

        Raises:
            DivergenceError: another rank of this host issued a different one here.
        """
        if self.before is not None:
            self.before()
        key = (operation, what, 0, None) if tensor is None else (operation, what, tensor.numel(), tensor.dtype)
        known = self._known.get(key)
        if known is None:
            entry: Entry = (operation, what, key[2], str(key[3] or "").removeprefix("torch."))
            known = self._known[key] = (entry, crc32(repr(entry).encode()))
        entry, code = known
        index = self.count
        if index % STRIDE == 0:
            self.marks.append((index, self.digest))
        self.digest = (self.digest * 1_000_003 + code) & _MASK
        self.entries.append(entry)
        self.thread = threading.get_ident()
        self.count = index + 1
        if self.board is not None and self.board.note(index, code) is not None and self.watch is not None:
            self.watch.diverged(self)
        return self

    def others(self, rank: int) -> list[int]:
        """Ranks that ``rank`` may be waiting for: the others on the ring, from the one after it."""
        place = self.ranks.index(rank)
        return [*self.ranks[place + 1 :], *self.ranks[:place]]

    def latest(self) -> dict[str, Any]:
        """What a report tells of the axis: the latest entries, from index ``first``."""
        entries, count = list(self.entries), self.count
        return {
            "name": self.name,
            "ranks": self.ranks,
            "count": count,
            "first": count - len(entries),
            "entries": entries,
            "inside": self.inside,
            "compared": self.compared,
        }

    def waiting(self, wait: Callable[[], Any]) -> Callable[[], None]:
        """``wait`` for a collective that was noted and issued before, as if it lasted until then."""

        around = nullcontext() if self.observer is None else self.observer.waiting(self)

        def call() -> None:
            self.inside = True
            try:
                with around:
                    wait()
            except RuntimeError as error:
                self.failed(error)
                raise
            self.inside = False

        return call

    def __enter__(self) -> None:
        self.inside = True
        if self.observer is not None:
            self.observer.begin(self)
        if comms_logger.enabled:
            operation, what, numel, dtype = self.entries[-1]
            itemsize = getattr(torch, dtype).itemsize if dtype else 0
            inputs = self.world_size if operation == "reduce-scatter" else 1  # noted is what comes out
            name = _DEEPSPEED.get((operation, bool(dtype)), operation)
            self._stop = comms_logger.start(name, numel * itemsize * inputs, self.world_size, what)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.observer is not None:
            self.observer.end(self)
        if self._stop is not None:
            stop, self._stop = self._stop, None
            if error is None:
                stop()
        self.inside = False
        if isinstance(error, RuntimeError):
            self.failed(error)

    def failed(self, error: RuntimeError) -> None:
        """What was noted raised ``error``.

        Raises:
            DivergenceError: from ``error``, unless all ranks are equally far.
        """
        self.inside = False
        self._stop = None
        if self.watch is not None:
            self.watch.failed(error)


_logs: weakref.WeakSet[CollectiveLog] = weakref.WeakSet()


def _in_child() -> None:
    """Of a fork: it has the connections and the board of the process that trains, and would write into both. Groups
    that it makes itself are its own."""
    for log in list(_logs):
        if log.world_size > 1:
            log.board, log.before = None, _refuse


def _refuse() -> NoReturn:
    raise DsHfError(
        "a model in training was used in a process made by fork (multiprocessing, a worker of a DataLoader), which is "
        "none of those that hold it together. Use it where it trains, or give the process a copy: copy.deepcopy(model) "
        "inside `with deepspeed.zero.GatheredParameters(list(model.parameters())):`, on all processes"
    )


os.register_at_fork(after_in_child=_in_child)
