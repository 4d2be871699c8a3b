"""When an update of what was put off is due, where ``update_interval`` is "auto"."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_hf.engine.comm import collectives
from ds_hf.engine.comm.mesh import Axis
from ds_hf.engine.optim.zenflow.columns import Columns

__all__ = ["Pressure"]


class Pressure:
    """Compares, matrix by matrix, what the columns that wait have gathered with what a chosen one gets in a step.

    A matrix presses when the gradients of its waiting columns, added up since the last update, are as large, a column
    on average, as those of its chosen ones in a step on average. An update is due when the share ``ratio`` of the
    matrices press. The host reads that a step later, when it need not wait for it.
    """

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self._gathered: Tensor | None = None  # [2, matrices]: of waiting columns, of chosen ones
        self._steps = 0
        self._answer: tuple[Tensor, torch.cuda.Event | None] | None = None

    def take(
        self,
        measured: Sequence[tuple[Columns, Tensor, Tensor]],
        axis: Axis,
        scale_and_skip: Tensor | None,
    ) -> None:
        """Count one step. Collective over ``axis``, the processes that have the shards.

        Args:
            measured: of each buffer its columns, their sums in this process and which are chosen.
        """
        counts = [count for columns, _, _ in measured for count in columns.counts]
        if not counts:
            return
        sums, picked = torch.cat([each for _, each, _ in measured]), torch.cat([each for _, _, each in measured])
        lengths = torch.tensor(counts, device=sums.device)
        parts = []
        for mask in (~picked, picked):
            both = sums * mask, mask.float()  # unsafe: the check of the lengths would wait for the device
            of, number = (torch.segment_reduce(part, "sum", lengths=lengths, unsafe=True) for part in both)
            parts.append(of / number.clamp(min=1))
        means = torch.stack(parts)
        means = collectives.all_reduce_sum(means, axis, "the gradients of waiting columns")
        if scale_and_skip is not None:
            means = means * scale_and_skip[0]
        self._gathered = means if self._gathered is None else self._gathered + means
        self._steps += 1
        presses = self._gathered[0] >= self._gathered[1] / self._steps
        due = presses.float().mean() >= self._ratio
        if due.is_cuda:
            there = torch.empty_like(due, device="cpu", pin_memory=True)
            there.copy_(due, non_blocking=True)
            self._answer = there, torch.cuda.current_stream(due.device).record_event()
        else:
            self._answer = due, None

    @property
    def due(self) -> bool:
        """Whether it was after the last step."""
        if self._answer is None:
            return False
        due, event = self._answer
        if event is not None:
            event.synchronize()
        return bool(due)

    def forget(self) -> None:
        """All was updated."""
        self._gathered, self._answer, self._steps = None, None, 0
