"""Where reduced gradients wait for the optimizer, and where those of several micro-batches are summed.

On the device they stay as they are. Offloaded ones go down while backward goes on. Sums over micro-batches are taken in
host memory by the worker, which has nothing else to do during backward: on the device they would take four bytes a
parameter, of what offload is to spare. Either way the squared norm is known when backward ends: of what is not summed,
the device takes it before the copy; of sums, the worker.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

import torch
from torch import Tensor

from ds_hf.engine.offload.link import DONE, Arrival, Link
from ds_hf.engine.offload.memory import host_empty
from ds_hf.engine.offload.worker import Worker
from ds_hf.engine.ops import library as ops

__all__ = ["DeviceHome", "GradientHome", "HostHome"]


class GradientHome(Protocol):
    """Keeps the gradients of one buffer; ``settle`` must have been called before what ``add`` gave is read.

    Attributes:
        adds_in_place: what ``add`` gave may be added to where it is, in ``accumulation_dtype``, without being asked.
    """

    adds_in_place: bool

    @property
    def squares(self) -> Tensor | None:
        """fp32 scalar, the squared norm of the gradient; ``None`` where nobody has taken it."""

    def add(self, owned: Tensor | None, reduced: Tensor) -> Tensor:
        """Take over ``reduced``, added to ``owned``; the sum, or the one gradient, that replaces ``owned``."""

    def settle(self) -> None:
        """Return when the gradient is where ``add`` said."""

    def clear(self) -> None:
        """The gradient was used or dropped."""


class DeviceHome:
    """Beside the model. The norm of all units is taken in one launch when they are there."""

    adds_in_place = True

    def __init__(self, accumulation_dtype: torch.dtype) -> None:
        self.accumulation_dtype = accumulation_dtype

    @property
    def squares(self) -> Tensor | None:
        return None

    def add(self, owned: Tensor | None, reduced: Tensor) -> Tensor:
        return reduced if owned is None else owned.to(self.accumulation_dtype).add_(reduced)

    def settle(self) -> None:
        """Always there."""

    def clear(self) -> None:
        """Nothing is kept."""


class HostHome:
    """In host memory that stays allocated.

    Args:
        accumulates: several micro-batches a step are expected; others are summed just the same.
        pinned: see ``host_empty``.
        places: landing places that take turns; 2 where an update may still read the last one.
    """

    adds_in_place = False

    def __init__(
        self,
        link: Link,
        worker: Worker,
        accumulation_dtype: torch.dtype,
        *,
        accumulates: bool,
        pinned: bool,
        places: int = 1,
    ) -> None:
        self._squares: Tensor | None = None
        self._link, self._worker = link, worker
        self._accumulation_dtype = accumulation_dtype
        self._accumulates, self._pinned, self._places = accumulates, pinned, places
        self._landing: list[Tensor] = []
        self._sums: list[Tensor] = []
        self._turn = 0
        self._arrival: Arrival = DONE
        self._work: Future[Tensor] | None = None

    @property
    def squares(self) -> Tensor | None:
        if self._work is not None:
            self.settle()
        return self._squares

    def add(self, owned: Tensor | None, reduced: Tensor) -> Tensor:
        self.settle()  # what landed last is in the sum: its place is free
        if owned is None:
            self._turn = (self._turn + 1) % self._places
        landing = self._place(self._landing, reduced.numel(), reduced.dtype)
        if owned is None and not self._accumulates:
            self._squares = ops.squared_norm([reduced])
            self._arrival = self._link.down(landing, reduced)
            return landing
        total = self._place(self._sums, reduced.numel(), self._accumulation_dtype)
        if owned is not None and owned is not total:  # more micro-batches than were expected, or a user's own gradient
            total.copy_(owned)
        self._squares = None
        arrival = self._link.down(landing, reduced)
        self._work = self._worker.submit(_accumulate, total, landing, arrival, first=owned is None)
        return total

    def _place(self, places: list[Tensor], numel: int, dtype: torch.dtype) -> Tensor:
        while len(places) <= self._turn:
            places.append(host_empty(numel, dtype, pinned=self._pinned))
        return places[self._turn]

    def settle(self) -> None:
        self._arrival.on_host()
        self._arrival = DONE
        if self._work is not None:
            work, self._work = self._work, None
            self._squares = work.result()

    def clear(self) -> None:
        self._squares = None  # what is on its way still lands: the next ``add`` waits for it

    def spare(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """Memory for as many 16-bit parameters as there are gradients: the place where these landed, which an update
        may overwrite element for element while it reads them; ``None`` where the sizes differ."""
        landing = self._landing[self._turn] if len(self._landing) > self._turn else None
        if landing is None or landing.numel() != numel or landing.dtype.itemsize != dtype.itemsize:
            return None
        return landing.view(dtype)


def _accumulate(total: Tensor, landing: Tensor, arrival: Arrival, *, first: bool) -> Tensor:
    """The squared norm of the sum."""
    arrival.on_host()
    if first:
        total.copy_(landing)
    elif total.dtype is torch.float32:
        # total - (-1) * landing in one pass, by all of the rank's threads; torch would make a wide copy first
        ops.sgd_(
            [total], [landing], [], [], None,
            lr=-1.0, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, first=False,
        )  # fmt: skip
    else:
        total.add_(landing)
    return ops.squared_norm([total])
