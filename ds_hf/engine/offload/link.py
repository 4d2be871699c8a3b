"""Copies between host and device beside the computation.

Invariants: a copy down waits for what the current stream has enqueued; whoever reads the result waits for its
``Arrival``. A copy up is ordered before what the current stream gets next, once ``Arrival.on_stream`` was called. The
host never waits but in ``Arrival.on_host``. Where the model computes on the CPU every copy is done at once.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from ds_hf.engine.ops.library import pulled_

__all__ = ["DONE", "Arrival", "Link", "new_stream"]

_IN_FLIGHT = 3  # gradients that may be on their way down, each kept alive on the device


def new_stream(device: torch.device) -> Any:
    """A stream beside the others; ``None`` where there are none."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


class Arrival:
    """The end of a copy.

    Args:
        event: recorded behind it, ``None`` when it is over.
    """

    def __init__(self, event: Any = None) -> None:
        self._event = event

    def on_host(self) -> None:
        """Return when the copy is over."""
        if self._event is not None:
            self._event.synchronize()

    def on_stream(self) -> None:
        """Let what the current stream gets from now on come after the copy."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


DONE = Arrival()


class Link:
    """The way between one device and the host, in both directions at once.

    Args:
        device: where the model computes.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.down_stream, self.up_stream = new_stream(device), new_stream(device)
        self._going_down: deque[tuple[Tensor, Arrival]] = deque()
        self._came_up: deque[Tensor] = deque()

    def down(self, target: Tensor, source: Tensor, *, kept: bool = False) -> Arrival:
        """Copy a device tensor into host memory; it stays alive until the copy is over.

        Args:
            kept: the caller sees to that; else what the current stream gets later waits for copies given before.
        """
        if self.down_stream is None or not source.is_cuda:
            target.copy_(source)
            return DONE
        self.down_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.down_stream):
            target.copy_(source, non_blocking=True)
            arrival = Arrival(self.down_stream.record_event())
        if kept:
            return arrival
        self._going_down.append((source, arrival))
        if len(self._going_down) > _IN_FLIGHT:
            # Its memory goes back to the current stream's pool, which must not write there before the copy is over.
            self._going_down[0][1].on_stream()
            self._going_down.popleft()
        return arrival

    def now(self) -> Arrival:
        """Over when the current stream has done what it was given so far."""
        return DONE if self.up_stream is None else Arrival(torch.cuda.current_stream().record_event())

    def up(
        self,
        target: Tensor,
        source: Tensor,
        *,
        after: Arrival = DONE,
        unused: Arrival | None = None,
        past: bool = False,
    ) -> Arrival:
        """Copy host memory into a device tensor that nobody uses after ``unused``, by default what the current stream
        was given so far.

        Args:
            past: do not wait behind what other links were given to copy up: a kernel copies, where one can.
        """
        if self.up_stream is None or not target.is_cuda:
            after.on_host()
            target.copy_(source)
            return DONE
        unused = unused or self.now()
        with torch.cuda.stream(self.up_stream):
            unused.on_stream()
            after.on_stream()
            if not (past and pulled_(target, source)):
                target.copy_(source, non_blocking=True)
            return Arrival(self.up_stream.record_event())

    def fetch(self, source: Tensor) -> tuple[Tensor, Arrival]:
        """A copy of host memory on the device, for what the current stream enqueues before the next call but one."""
        if self.up_stream is None:
            return source, DONE
        # Frees of what was fetched before must not let this copy overtake its readers.
        self.up_stream.wait_stream(torch.cuda.current_stream())
        while len(self._came_up) > 1:
            self._came_up.popleft()
        with torch.cuda.stream(self.up_stream):
            made = torch.empty(source.shape, dtype=source.dtype, device=self.device)
            made.copy_(source, non_blocking=True)
            arrival = Arrival(self.up_stream.record_event())
        self._came_up.append(made)
        return made, arrival

    def close(self) -> None:
        """Wait for everything and let go."""
        if self.up_stream is not None:
            self.down_stream.synchronize()
            self.up_stream.synchronize()
        self._going_down.clear()
        self._came_up.clear()
