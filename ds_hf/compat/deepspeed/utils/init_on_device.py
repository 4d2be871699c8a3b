"""``OnDevice``: modules built inside get their parameters on a device and in a dtype, ``meta`` by default."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType

import torch

__all__ = ["OnDevice"]


class OnDevice:
    """Context manager.

    Args:
        dtype: of floating-point parameters and constants made inside.
        device: where they lie; ``"meta"`` keeps nothing but shapes.
        enabled: False changes nothing.
    """

    def __init__(self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> None:
        self.dtype, self.device, self.enabled = dtype, torch.device(device), enabled
        self._undo = ExitStack()

    def __enter__(self) -> None:
        if self.enabled:
            self._undo.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self.dtype)
            self._undo.enter_context(self.device)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()
