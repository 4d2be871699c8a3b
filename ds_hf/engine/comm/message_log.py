"""The log of messages between single processes: shown in reports of hangs, and never compared, for each has its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from torch import Tensor

from ds_hf.engine.comm.log import CollectiveLog

__all__ = ["MessageLog"]


class MessageLog(CollectiveLog):
    """What this process sends and receives.

    Attributes:
        peer: global rank of the process that this one waits for, ``None`` while it waits for none.
    """

    compared = False
    _numbers = itertools.count()  # several engines of a process have their own

    def __init__(self, ranks: tuple[int, ...], rank: int, name: str, key: str) -> None:
        super().__init__(ranks, name, f"{key}/messages of {rank}/{next(self._numbers)}")
        self.peer: int | None = None

    def __call__(self, operation: str, what: str, tensor: Tensor | None = None) -> MessageLog:
        """Note a message."""
        self.entries.append((operation, what, 0 if tensor is None else tensor.numel(), ""))
        self.count += 1
        return self

    def others(self, rank: int) -> list[int]:
        """The one that is waited for."""
        return [] if self.peer is None else [self.peer]

    def close(self) -> None:
        """Nothing is sent any more: the watch forgets this log."""
        if self.watch is not None:
            self.watch.logs = [log for log in self.watch.logs if log is not self]

    @contextmanager
    def awaiting(self, peer: int) -> Iterator[None]:
        """Inside, this process waits for the one with global rank ``peer``.

        Raises:
            DivergenceError: the connection failed; it tells where all processes are.
        """
        self.peer, self.inside = peer, True
        try:
            with nullcontext() if self.observer is None else self.observer.awaiting(self, peer):
                yield
        except RuntimeError as error:
            if self.watch is not None:
                self.watch.failed(error)
            raise
        finally:
            self.peer, self.inside = None, False
