"""Gradients of which the device keeps what it needs of them before they go down to host memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import torch
from torch import Tensor

from ds_hf.engine.offload.link import HostLink
from ds_hf.engine.offload.worker import Worker
from ds_hf.engine.optim.zenflow.columns import Columns
from ds_hf.engine.zero.storage import HostGradientStorage, summed_in

__all__ = ["ColumnGradients"]

PLACES = 2  # an update on the host may take two steps before backward has to wait for it


class ColumnGradients(HostGradientStorage):
    """Of one buffer.

    Args:
        measures: whether sums over columns are wanted of the present step.

    Attributes:
        columns: of the buffer, known once the optimizer knows its segments.
        positions: of the chosen elements, on the device; ``None`` as long as there are none.
    """

    def __init__(
        self,
        link: HostLink,
        worker: Worker,
        accumulation_dtype: torch.dtype,
        *,
        accumulates: bool,
        pinned: bool,
        measures: Callable[[], bool],
    ) -> None:
        super().__init__(link, worker, accumulation_dtype, accumulates=accumulates, pinned=pinned, places=PLACES)
        self._measures, self._sum_dtype = measures, accumulation_dtype
        self.columns: Columns | None = None
        self.positions: Tensor | None = None
        self._picked: Tensor | None = None
        self._sizes: Tensor | None = None
        self._readers: dict[int, Future[None]] = {}

    def add(self, owned: Tensor | None, reduced: Tensor) -> Tensor:
        if owned is None:
            self._picked = self._sizes = None
            self.turn()
        if self.positions is not None:
            picked = reduced.index_select(0, self.positions)
            if self._picked is not None:
                picked = self._picked.to(summed_in(self._sum_dtype, picked.dtype)).add_(picked)
            self._picked = picked
        if self.columns is not None and self._measures():
            sums = self.columns.sums(reduced)
            self._sizes = sums if self._sizes is None else self._sizes.add_(sums)
        return super().add(owned, reduced)

    def picked(self, owned: Tensor, device: torch.device) -> Tensor:
        """The gradient of the chosen elements, on ``device``. ``owned``: all of it, as ``GradientBuffer.owned``."""
        assert self.positions is not None
        if self._picked is None:  # the gradient was replaced
            self.settle()
            return owned.index_select(0, self.positions.to(owned.device)).to(device)
        return self._picked

    def sums(self, owned: Tensor | None, device: torch.device) -> Tensor:
        """Of each column, of the sizes of its elements' gradients; over micro-batches, added up. See ``picked``."""
        assert self.columns is not None
        if owned is None:
            return torch.zeros(sum(self.columns.counts), dtype=torch.float32, device=device)
        if self._sizes is None:
            self.settle()
            return self.columns.sums(owned).to(device)
        return self._sizes

    def read_by(self, task: Future[None]) -> None:
        """``task`` reads what ``add`` gave; it is waited for before that memory is written to again."""
        self._readers[self._turn] = task

    def _place(self, places: list[Tensor], numel: int, dtype: torch.dtype) -> Tensor:
        reader = self._readers.pop(self._turn, None)
        if reader is not None:
            reader.result()
        return super()._place(places, numel, dtype)

    def clear(self) -> None:
        super().clear()
        self._picked = self._sizes = None

    def spare(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        return None  # the next gradients come there before the parameters have left
