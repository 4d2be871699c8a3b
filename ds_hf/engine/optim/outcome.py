"""What became of a step: the gradient norm, and whether it was skipped. The GPU knows first, the host when it asks.

Asking waits until the norm is there and no longer: what was queued after it, the update, goes on meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Outcome", "remember_schedule"]


class Outcome:
    """Of the latest step."""

    def __init__(self) -> None:
        self.scale = 1.0
        self.checked = False
        self._event: torch.cuda.Event | None = None
        self._norm = torch.zeros(())
        self._pinned: Tensor | None = None  # allocated once: that may wait for the device, holding the interpreter

    def take(self, norm: Tensor, scale: float, checked: bool) -> None:
        """Of a new step; ``overflow`` of the one before must have been asked for, if anybody will.

        Args:
            norm: 0-dim, of the gradients with their loss scale; inf or nan if one of them is.
            scale: that loss scale.
            checked: a norm that is not finite skips the step.
        """
        self.scale, self.checked = scale, checked
        self._norm, self._event = norm, None
        if norm.is_cuda:
            if self._pinned is None:
                self._pinned = torch.empty_like(norm, device="cpu", pin_memory=True)
            self._norm = self._pinned
            self._norm.copy_(norm, non_blocking=True)
            self._event = torch.cuda.current_stream(norm.device).record_event()

    @property
    def known(self) -> bool:
        """Asking will not wait."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def _value(self) -> float:
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return float(self._norm)

    @property
    def on_host(self) -> bool:
        """The norm never was anywhere else."""
        return self._event is None

    @property
    def value(self) -> float:
        """The norm with the loss scale, as it is; waits for it."""
        return self._value()

    @property
    def norm(self) -> float:
        """Without the loss scale; infinite also where a gradient was nan: accelerate's users compare with numbers."""
        value = self._value()
        return value / self.scale if math.isfinite(value) else math.inf

    @property
    def overflow(self) -> bool:
        """The step was skipped."""
        return self.checked and not math.isfinite(self._value())


def remember_schedule(scheduler: Any, groups: list[dict[str, Any]]) -> Callable[[], None]:
    """A function that takes a scheduler, and what it writes into ``groups``, back to where they are now."""
    state = {key: list(value) if type(value) is list else value for key, value in scheduler.state_dict().items()}
    values = [{key: value for key, value in group.items() if key != "params"} for group in groups]

    def undo() -> None:
        scheduler.load_state_dict(state)
        for group, before in zip(groups, values, strict=True):
            group.update(before)

    return undo
