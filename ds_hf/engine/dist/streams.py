"""Lanes: streams on which gathers and reductions run beside the computation.

Invariants
- What runs on a lane comes after all that was queued on the current stream before it: a lane may take memory that the
  computation has just given back.
- Memory that a lane allocates is its own: given back, only the lane takes it again.
- Nobody reads what a lane wrote before ``join``, or ``wait`` for its event; what a lane reads and others allocated is
  kept until it has been read. Nothing waits on the host, and ``record_stream`` is not needed.

On the CPU a lane is the thread itself: everything is done when it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["Lane", "wait"]


class Lane:
    """A stream of ``device``.

    Args:
        device: ``None``, or one that is not CUDA: no stream.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        cuda = device is not None and device.type == "cuda"
        self.stream: torch.cuda.Stream | None = None
        if cuda:
            self.stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._behind = False  # something was queued since the last join
        self._kept: list[tuple[torch.cuda.Event, Tensor]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """What is queued inside runs on the lane, after what the current stream has been given so far."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        self._behind = True
        with torch.cuda.stream(self.stream):
            yield

    def event(self) -> torch.cuda.Event | None:
        """Done when all that the lane has been given so far is."""
        return None if self.stream is None else self.stream.record_event()

    def keep(self, tensor: Tensor) -> None:
        """Hold ``tensor``, which the lane reads, until ``settle``."""
        event = self.event()
        if event is not None:
            self._kept.append((event, tensor))

    def settle(self) -> None:
        """Let go of what was kept, for the current stream to take its memory: it waits for the lane to have read it."""
        for event, _ in self._kept:
            wait(event)
        self._kept.clear()

    def join(self) -> None:
        """The current stream goes on when the lane has done all it was given."""
        if self.stream is not None and self._behind:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
            self._behind = False
            self._kept.clear()


def wait(event: torch.cuda.Event | None) -> None:
    """The current stream goes on after ``event``."""
    if event is not None:
        event.wait()
