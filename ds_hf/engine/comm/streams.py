"""Communication streams, on which gathers and reductions run beside the computation.

Invariants
- What runs on a communication stream comes after all that was queued on the current stream before it: it may take
  memory that the computation has just given back.
- Memory that a stream allocates is its own: given back, only the stream takes it again.
- What it wrote is read after ``join`` only, or ``wait`` for its event; what it reads and others allocated is kept
  until it has been read. Nothing waits on the host, and ``record_stream`` is not needed.

On the CPU it is the thread itself: everything is done when it is asked for, but for small collectives, which gloo's
threads carry on with until ``arrive``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor

from ds_hf.engine.events import Waits

__all__ = ["Awaited", "CommStream", "wait"]

# What collectives of the CPU may be under way at once: enough for ranks with small models to wait for each other once a
# step, too little to count as memory.
UNDER_WAY_NBYTES = 4 << 20


class Awaited(Protocol):
    """What comes to an end beside the current stream, as a ``torch.cuda.Event`` does."""

    def wait(self) -> Any:
        """The current stream goes on after it."""


class CommStream:
    """A stream of ``device``: what is queued inside ``with`` runs on it, after what the current stream was given.

    Args:
        device: ``None``, or one that is not CUDA: no stream.
        under_way_nbytes: of collectives of the CPU that may be under way; default ``UNDER_WAY_NBYTES``.
    """

    waits: Waits | None = None

    def __init__(self, device: torch.device | None = None, under_way_nbytes: float | None = None) -> None:
        self.stream: torch.cuda.Stream | None = None
        if device is not None and device.type == "cuda":
            self.stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
            self._reached = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._index = self.stream.device.index
            self._own = (self.stream.stream_id, self.stream.device_index, self.stream.device_type)
        self._left: list[tuple[int, int, int]] = []
        self._behind = False  # something was queued since the last join
        self._kept: deque[tuple[torch.cuda.Event, list[Tensor], int]] = deque()
        self._kept_nbytes = 0
        self._idle: list[torch.cuda.Event] = []  # to be recorded again: what waits for them has been told to
        self._under_way: list[Callable[[], None]] = []  # collectives of the CPU; each call returns when one is over
        self._under_way_nbytes, self._most_under_way = 0, under_way_nbytes

    def __enter__(self) -> None:
        if self.stream is None:
            return
        # torch.cuda.current_stream() and set_stream() do the same for ten times as much of the host's time.
        ids = torch._C._cuda_getCurrentStream(self._index)
        self._left.append(ids)
        self._reached.record(_stream_of(ids))
        self._reached.wait(self.stream)
        self._behind = True
        _set_stream(self._own)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.stream is not None:
            _set_stream(self._left.pop())

    def event(self, used: torch.cuda.Event | None = None) -> torch.cuda.Event | None:
        """Done when all that the stream has been given so far is.

        Args:
            used: one that will not be waited for any more, to be recorded again: that is faster than to make one.
        """
        return None if self.stream is None else self.stream.record_event(used)

    def keep(self, tensors: list[Tensor]) -> None:
        """Hold ``tensors``, any tensors that the stream reads, until ``settle``."""
        if self.stream is not None and tensors:
            event = self.stream.record_event(self._idle.pop() if self._idle else None)
            nbytes = sum(tensor.nbytes for tensor in tensors)
            self._kept.append((event, tensors, nbytes))
            self._kept_nbytes += nbytes

    def settle(self, spared_nbytes: int = 0) -> None:
        """Let go of what was kept, for the current stream to take its memory: it waits for the stream to have read it.

        Args:
            spared_nbytes: so much of the latest may stay kept, and is not waited for.
        """
        if self._kept_nbytes <= spared_nbytes:
            return
        if self.waits is None:
            self._let_go(spared_nbytes)
        else:
            with self.waits(self, "settle") or nullcontext():
                self._let_go(spared_nbytes)

    def _let_go(self, spared_nbytes: int) -> None:
        while self._kept_nbytes > spared_nbytes:
            event, _, nbytes = self._kept.popleft()
            wait(event)
            self._idle.append(event)
            self._kept_nbytes -= nbytes

    def await_later(self, over: Callable[[], None], nbytes: int) -> None:
        """A collective of ``nbytes`` was issued on the CPU; ``over`` returns when it has ended."""
        self._under_way.append(over)
        self._under_way_nbytes += nbytes
        most = UNDER_WAY_NBYTES if self._most_under_way is None else self._most_under_way
        if self._under_way_nbytes > most:
            self.arrive()

    def arrive(self) -> None:
        """Return when the collectives of the CPU that were issued have ended. On a GPU nothing is waited for.

        Raises:
            RuntimeError: one of them failed.
        """
        under_way, self._under_way, self._under_way_nbytes = self._under_way, [], 0
        for over in under_way:
            over()

    def join(self) -> None:
        """The current stream goes on when this one has done all it was given."""
        if self._under_way:
            self.arrive()
        if self.stream is None or not self._behind:
            return
        if self.waits is None:
            self._join(self.stream)
        else:
            with self.waits(self, "join") or nullcontext():
                self._join(self.stream)

    def _join(self, stream: torch.cuda.Stream) -> None:
        _stream_of(torch._C._cuda_getCurrentStream(self._index)).wait_stream(stream)
        self._behind = False
        self._idle += (event for event, _, _ in self._kept)
        self._kept.clear()
        self._kept_nbytes = 0


_streams: dict[tuple[int, int, int], torch.cuda.Stream] = {}


def _stream_of(ids: tuple[int, int, int]) -> torch.cuda.Stream:
    stream = _streams.get(ids)
    if stream is None:
        number, index, kind = ids
        stream = torch.cuda.Stream(stream_id=number, device_index=index, device_type=kind)  # type: ignore[no-untyped-call]
        _streams[ids] = stream
    return stream


def _set_stream(ids: tuple[int, int, int]) -> None:
    number, index, kind = ids
    torch._C._cuda_setStream(stream_id=number, device_index=index, device_type=kind)


def wait(event: Awaited | None) -> None:
    """The current stream goes on after ``event``."""
    if isinstance(event, torch.cuda.Event):  # without a stream it asks torch for the current one, at some length
        event.wait(_stream_of(torch._C._cuda_getCurrentStream(torch._C._cuda_getDevice())))
    elif event is not None:
        event.wait()
