"""Random numbers of sampling, apart from those of training.

``engine.generate`` leaves torch's generators as it found them: dropout and shuffles of the training around it are those
of a run that never generates. So that two calls do not draw the same numbers, the second goes on where the first
stopped; if torch's generator was seeded or drawn from in between, a call starts from its state as usual.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["RandomStream"]


class RandomStream:
    """Of one engine.

    Args:
        device: where it computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        self._left: list[Tensor] = []  # the states that the last call found and left
        self._next: list[Tensor] = []  # where it stopped
        self._seed: tuple[Any, ...] = ()

    @contextmanager
    def drawn_from(self) -> Iterator[None]:
        """Calls inside draw from this stream."""
        found, seed = self._states(), _last_seeding()
        begins = self._next if self._next and seed == self._seed and _same(found, self._left) else found
        self._set(begins)
        try:
            yield
        finally:
            ended = self._states()
            if not _same(ended, begins):
                self._left, self._next, self._seed = found, ended, seed
            self._set(found)

    def _states(self) -> list[Tensor]:
        states = [torch.get_rng_state()]
        if self._cuda is not None:
            states.append(torch.cuda.get_rng_state(self._cuda))
        return states

    def _set(self, states: list[Tensor]) -> None:
        torch.set_rng_state(states[0])
        if self._cuda is not None:
            torch.cuda.set_rng_state(states[1], self._cuda)


def _same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(map(torch.equal, left, right))


def _last_seeding() -> tuple[Any, ...]:
    """Something that is unequal after each ``torch.manual_seed``, for who seeds with one number twice wants the same
    numbers twice. torch keeps it for kinds of devices that are not in use, to seed those when they are."""
    trackers = (getattr(module, "_lazy_seed_tracker", None) for module in (torch.cuda, torch.xpu, torch.mtia))
    return tuple(getattr(tracker, "manual_seed_all_cb", None) for tracker in trackers)
