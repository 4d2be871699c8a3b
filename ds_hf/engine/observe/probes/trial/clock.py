"""Marks in time between pieces of work: events of the device where it computes by itself, the host's clock elsewhere.

With events the host does not wait between steps, so that a step is as long as in training and not longer.
"""

from __future__ import annotations

import time
from itertools import pairwise

import torch

__all__ = ["Clock"]


class Clock:
    """``mark`` while working, ``read`` afterwards."""

    def __init__(self, device: torch.device) -> None:
        self.on_device = device.type == "cuda"
        self.device = device
        self._marks: list[float | torch.cuda.Event] = []

    def mark(self) -> None:
        """Note this point of the work."""
        if self.on_device:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self.device))
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def read(self) -> list[float]:
        """Seconds from each mark to the next; waits for the device. Starts again."""
        marks, self._marks = self._marks, []
        if self.on_device:
            torch.cuda.synchronize(self.device)
            pairs = pairwise(marks)
            return [
                a.elapsed_time(b) / 1e3
                for a, b in pairs
                if isinstance(a, torch.cuda.Event) and not isinstance(b, float)
            ]
        return [float(b) - float(a) for a, b in pairwise(marks)]  # type: ignore[arg-type]
