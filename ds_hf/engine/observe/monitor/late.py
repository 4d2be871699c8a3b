"""Numbers on their way from a GPU to the host: writing one down does not wait for the GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["LateCopy", "later"]


class LateCopy:
    """A copy in page-locked memory that the GPU makes when it comes to it."""

    def __init__(self, value: Tensor) -> None:
        self._copy = torch.empty((), dtype=value.dtype, device="cpu", pin_memory=True)
        self._copy.copy_(value.detach().reshape(()), non_blocking=True)
        self._event = torch.cuda.current_stream(value.device).record_event()

    @property
    def ready(self) -> bool:
        """It has arrived."""
        return bool(self._event.query())

    def item(self) -> Any:
        """The number; waits until it is ready."""
        self._event.synchronize()
        return self._copy.item()


def later(value: Any) -> Any:
    """``value`` for later use: a ``LateCopy`` of what lies on a GPU, other tensors' numbers, anything else as it is.

    Raises:
        ValueError: a tensor has more than one element.
    """
    if not isinstance(value, Tensor):
        return value
    if value.numel() != 1:
        raise ValueError(f"an event takes one number, but the value has shape {tuple(value.shape)}: reduce it first")
    return LateCopy(value) if value.is_cuda else value.item()
