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

if TYPE_CHECKING:
    from ds_hf.engine.dist.watch import Watch

__all__ = ["CollectiveLog", "Entry"]

KEPT = 512  # latest entries that a report can show
STRIDE = 256  # between the marks by which ranks of different hosts compare
_MASK = (1 << 62) - 1


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
    """

    def __init__(self) -> None:
        self.board: Board | None = None
        self.store: Store | None = None
        self.count = 0
        self.entries: deque[Entry] = deque(maxlen=KEPT)
        self.marks: deque[tuple[int, int]] = deque(maxlen=64)
        self.digest = 0
        self.thread = threading.get_ident()
        self.watch: Watch | None = None
        self.before: Callable[[], None] | None = None
        self.agreement: Any = None
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

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, RuntimeError) and self.watch is not None:
            self.watch.failed(error)
