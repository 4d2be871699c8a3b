"""Tells of a step whose gradient norm is not finite: which step, which parameter, whose loss (``ds_hf.nonfinite``).

Invariants
- While norms are finite, all that happens is that the host compares a number that it has anyway: nothing is launched,
  sent or waited for. The loss of each micro-batch is remembered, a reference to one number.
- Ranks speak to each other only where all of them have the norm before the update: on the CPU, and with "error".
  On a GPU the host learns of it at the next step, and each rank tells what it sees itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ds_hf.config.plan import NonFiniteMode
from ds_hf.engine.dist import collectives
from ds_hf.engine.dist.mesh import Axis
from ds_hf.engine.dist.report import ranks_text
from ds_hf.engine.zero.buffer import FlatBuffer
from ds_hf.errors import NonFiniteError
from ds_hf.log import logger

__all__ = ["NonFinite"]

_ENDS: dict[NonFiniteMode, str] = {
    "warn": (
        'The step is made, and the weights are no longer finite: {"ds_hf": {"nonfinite": "skip"}} leaves such steps '
        'out, "error" ends training before them.'
    ),
    "skip": "The step is skipped; the weights are as they were.",
    "error": 'The weights are as they were before this step ("ds_hf": {"nonfinite": "error"}).',
}
_ABSENT = 1 << 62


class _Seen(NamedTuple):
    """What one rank knows: place of the first bad parameter in the model, and whether a loss of its was bad."""

    place: int = _ABSENT
    loss: bool = False


class NonFinite:
    """What the engine and its optimizer tell of their steps.

    Args:
        mode: what becomes of such a step.
        whole: every rank has the whole gradient.
        names: of the model's parameters by ``id``, in the order of the model.
        accumulation: micro-batches of a step, as a rule.
    """

    def __init__(
        self, mode: NonFiniteMode, axis: Axis, *, whole: bool, names: Mapping[int, str], accumulation: int
    ) -> None:
        self.mode = mode
        self._axis, self._whole, self._names = axis, whole, names
        self._step = 0
        self._losses: deque[Tensor] = deque(maxlen=accumulation)
        self._past: deque[Tensor] = deque(maxlen=accumulation)
        self._told = False  # of this run of bad steps

    @property
    def waits(self) -> bool:
        """The host needs the norm before the update. After a bad step too: of the next one the parameter is told."""
        return self._told or self.mode == "error"

    def remember(self, loss: Tensor) -> None:
        """Of a micro-batch of the coming step."""
        self._losses.append(loss.detach())

    def begin(self, step: int) -> None:
        """The step of this number, counted from 1, is made of the losses so far."""
        self._step = step
        self._past, self._losses = self._losses, self._past
        self._losses.clear()

    def fine(self) -> None:
        """The norm is finite."""
        self._told = False

    def tell(
        self, norm: float, values: Iterable[tuple[FlatBuffer, Tensor]], *, together: bool, device: torch.device
    ) -> None:
        """The norm is not finite.

        Args:
            values: over what this rank owns of each buffer, what is to be looked at: gradients, or what they became.
            together: all ranks are here, so that one tells of all.
            device: where they meet.

        Raises:
            NonFiniteError: the mode is "error".
        """
        if self._told and self.mode != "error":
            return
        self._told = True
        mine = _Seen(self._first(values), any(not bool(loss.isfinite().all()) for loss in self._past))
        ranks = range(self._axis.world_size) if together else [self._axis.rank]
        seen = dict(zip(ranks, self._gather(mine, device) if together else [mine], strict=True))
        text = self._text(norm, seen, complete=len(seen) == self._axis.world_size)
        if self.mode == "error":
            raise NonFiniteError(text)
        if self._axis.rank == 0 or (not together and (mine.loss or (mine.place != _ABSENT and not self._whole))):
            logger.warning("%s", text)

    def _first(self, values: Iterable[tuple[FlatBuffer, Tensor]]) -> int:
        """Place in the model of the first parameter with something bad in ``values``."""
        places = {key: place for place, key in enumerate(self._names)}
        found = _ABSENT
        for buffer, owned in values:
            if bool(owned.isfinite().all()):
                continue
            for fragment in buffer.layout.fragments(buffer.axis.rank, whole=self._whole):
                piece = owned[fragment.shard_start : fragment.shard_start + fragment.numel]
                place = places.get(id(buffer.params[fragment.slot.index]), _ABSENT)
                if place < found and not bool(piece.isfinite().all()):
                    found = place
        return found

    def _gather(self, mine: _Seen, device: torch.device) -> list[_Seen]:
        one = torch.tensor(mine, dtype=torch.int64, device=device)
        every = one.new_empty(2 * self._axis.world_size)
        collectives.all_gather(every, one, self._axis, "what is not finite")
        return [_Seen(place, bool(loss)) for place, loss in every.view(-1, 2).tolist()]

    def _text(self, norm: float, seen: Mapping[int, _Seen], *, complete: bool) -> str:
        alone = self._axis.world_size == 1
        parts = [f"step {self._step}: the norm of the gradients is {norm:g}."]
        first = min(one.place for one in seen.values())
        if first != _ABSENT:
            ranks = [rank for rank, one in seen.items() if one.place == first]
            where = "" if alone or self._whole else f", in what {ranks_text(ranks)} keeps of it"
            which = "The first parameter" if complete or self._whole else "The first parameter that this rank sees"
            parts.append(f"{which} whose gradient is not finite is {list(self._names.values())[first]!r}{where}.")
        bad = [rank for rank, one in seen.items() if one.loss]
        if bad:
            parts.append(f"The loss was not finite{'' if alone else f' on {ranks_text(bad)}'}.")
        elif complete and self._past:
            parts.append(f"The loss was finite{'' if alone else ' on every rank'}: backward made it so.")
        return " ".join([*parts, _ENDS[self.mode]])
