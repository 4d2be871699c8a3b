"""What collectives this process issued, in order: ranks of a healthy run have the same log.

``with log("all-gather", "weights of model.layers.3", tensor):`` around a collective notes it (about two microseconds)
and turns a failure of it, or a difference from another rank, into a ``DivergenceError`` that says where the ranks
parted. The rest of the work is done by the thread of ``watch``, and only when something is wrong.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from ds_hf.engine.dist.board import Board
from ds_hf.engine.dist.comms_logger import comms_logger

if TYPE_CHECKING:
    from ds_hf.engine.dist.watch import Watch

__all__ = ["CollectiveLog", "Entry"]

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
}


Entry = tuple[str, str, int, str]  # operation, on what, elements, dtype


class CollectiveLog:
    """The log of one axis.

    Attributes:
        count: collectives issued so far.
        entries: the latest ``KEPT`` of them.
        marks: digest of all entries before each multiple of ``STRIDE``.
        thread: which thread issued the last one.
        board: memory shared with the other ranks of the host, if any.
        store: where ranks meet; ``None`` for a single process.
        watch: who compares and reports; ``None`` until an engine starts it.
        before: called before each collective; may raise instead of it (``memory``).
        agreement: what ``memory`` keeps for the axis.
        world_size: number of ranks on the axis.
    """

    def __init__(self, world_size: int = 1) -> None:
        self.world_size = world_size
        self.board: Board | None = None
        self.store: Store | None = None
        self.count = 0
        self.entries: deque[Entry] = deque(maxlen=KEPT)
        self.marks: deque[tuple[int, int]] = deque(maxlen=64)
        self.digest = 0
        self.inside = False  # of the call that issues one, which on the CPU lasts as long as the collective
        self.thread = threading.get_ident()
        self.watch: Watch | None = None
        self.before: Callable[[], None] | None = None
        self.agreement: Any = None
        self._stop: Callable[[], None] | None = None
        self._known: dict[tuple[str, str, int, torch.dtype | None], tuple[Entry, int]] = {}

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
            self.watch.diverged()
        return self

    def waiting(self, wait: Callable[[], Any]) -> Callable[[], None]:
        """``wait`` for a collective that was noted and issued before, as if it lasted until then."""

        def call() -> None:
            self.inside = True
            try:
                wait()
            except RuntimeError as error:
                self.__exit__(type(error), error, error.__traceback__)
                raise
            self.inside = False

        return call

    def __enter__(self) -> None:
        self.inside = True
        if comms_logger.enabled:
            operation, what, numel, dtype = self.entries[-1]
            itemsize = getattr(torch, dtype).itemsize if dtype else 0
            inputs = self.world_size if operation == "reduce-scatter" else 1  # noted is what comes out
            name = _DEEPSPEED.get((operation, bool(dtype)), operation)
            self._stop = comms_logger.start(name, numel * itemsize * inputs, self.world_size, what)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.inside = False
        if self._stop is not None:
            stop, self._stop = self._stop, None
            if error is None:
                stop()
        if isinstance(error, RuntimeError) and self.watch is not None:
            self.watch.failed(error)
