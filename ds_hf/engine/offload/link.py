"""Copies between host and device beside the computation.

Invariants: a copy down waits for what the current stream has enqueued; to read the result is to wait for its
``Arrival``. A copy up is ordered before what the current stream gets next, once ``Arrival.on_stream`` was called. The
host never waits but in ``Arrival.on_host``. Where the model computes on the CPU every copy is done at once.

A GPU has one engine for each direction. It takes from one stream until what is next there has to wait, and only then
from another, whatever the priorities: what is given late, as a loss that a script looks at, would come after all that
was given before (``benchmarks/results/2026-11-23-copy-engine-turns-h200.txt``). A link that carries much therefore
copies in parts, by two streams in turn, each part after the one before, so that others' copies get between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ds_hf.engine.events import Waits, told

__all__ = ["DONE", "Arrival", "HostLink", "new_stream"]

_IN_FLIGHT = 3  # gradients that may be on their way down, each kept alive on the device
_PART = 128 << 20  # bytes: 3 ms at 45 GB/s; others wait for two of them at most


def new_stream(device: torch.device) -> Any:
    """A stream beside the others; ``None`` where there are none."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


class Arrival:
    """The end of a copy.

    Args:
        event: recorded behind it, ``None`` when it is over.
    """

    waits: Waits | None = None

    def __init__(self, event: Any = None) -> None:
        self._event = event

    @told
    def on_host(self) -> None:
        """Return when the copy is over."""
        if self._event is not None:
            self._event.synchronize()

    @told
    def on_stream(self) -> None:
        """Let what the current stream gets from now on come after the copy."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


DONE = Arrival()


class _Direction:
    """Copies in one direction, each after the one before.

    Args:
        yielding: others' copies get between the parts of a large one.
    """

    def __init__(self, device: torch.device, *, yielding: bool) -> None:
        self.streams = [new_stream(device) for _ in range(2 if yielding else 1)]
        self._turn = 0
        self._last: Any = None

    def copy(self, target: Tensor, source: Tensor, *befores: Arrival) -> Arrival:
        """``target.copy_(source)`` when ``befores`` are over; both flat if they are large."""
        for to, of in self._parts(target, source):
            stream = self.streams[self._turn]
            self._turn = (self._turn + 1) % len(self.streams)
            with torch.cuda.stream(stream):
                for before in (*befores, Arrival(self._last)):
                    before.on_stream()
                to.copy_(of, non_blocking=True)
                self._last = stream.record_event()
            befores = ()
        return Arrival(self._last)

    def _parts(self, target: Tensor, source: Tensor) -> Sequence[tuple[Tensor, Tensor]]:
        count = -(-target.nbytes // _PART) if len(self.streams) > 1 else 1
        if count <= 1:
            return [(target, source)]
        return list(zip(target.chunk(count), source.chunk(count), strict=True))

    def synchronize(self) -> None:
        for stream in self.streams:
            stream.synchronize()


class HostLink:
    """The way between one device and the host, in both directions at once.

    Args:
        device: where the model computes.
        yielding: it carries much, and others' copies shall not wait for all of it.
    """

    def __init__(self, device: torch.device, *, yielding: bool = False) -> None:
        self.device = device
        self._up = self._down = None
        if device.type == "cuda":
            self._up, self._down = (_Direction(device, yielding=yielding) for _ in range(2))
        self._going_down: deque[tuple[Tensor, Arrival]] = deque()
        self._came_up: deque[Tensor] = deque()

    def down(self, target: Tensor, source: Tensor, *, kept: bool = False) -> Arrival:
        """Copy a device tensor into host memory; it stays alive until the copy is over.

        Args:
            kept: the caller sees to that; else what the current stream gets later waits for copies given before.
        """
        if self._down is None or not source.is_cuda:
            target.copy_(source)
            return DONE
        arrival = self._down.copy(target, source, self.now())
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
        return DONE if self._up is None else Arrival(torch.cuda.current_stream().record_event())

    def up(self, target: Tensor, source: Tensor, *, after: Arrival = DONE, unused: Arrival | None = None) -> Arrival:
        """Copy host memory into a device tensor that is not used after ``unused``, by default what the current stream
        was given so far."""
        if self._up is None or not target.is_cuda:
            after.on_host()
            target.copy_(source)
            return DONE
        return self._up.copy(target, source, unused or self.now(), after)

    def fetch(self, source: Tensor) -> tuple[Tensor, Arrival]:
        """A copy of host memory on the device, for what the current stream enqueues before the next call but one."""
        if self._up is None:
            return source, DONE
        while len(self._came_up) > 1:
            self._came_up.popleft()
        with torch.cuda.stream(self._up.streams[0]):
            made = torch.empty(source.shape, dtype=source.dtype, device=self.device)
        # Frees of what was fetched before must not let this copy overtake its readers.
        arrival = self._up.copy(made, source, self.now())
        self._came_up.append(made)
        return made, arrival

    def close(self) -> None:
        """Wait for everything and let go."""
        for direction in (self._up, self._down):
            if direction is not None:
                direction.synchronize()
        self._going_down.clear()
        self._came_up.clear()
