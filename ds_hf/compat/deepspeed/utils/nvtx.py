"""``deepspeed.utils.nvtx``: ranges for a profiler."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from ds_hf.deepspeed_api.accelerator import get_accelerator

__all__ = ["instrument_w_nvtx"]

F = TypeVar("F", bound=Callable[..., Any])


def instrument_w_nvtx(func: F) -> F:
    """Show each call of ``func`` as a range in a profiler that listens."""

    @functools.wraps(func)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        device = get_accelerator()
        device.range_push(func.__qualname__)
        try:
            return func(*args, **kwargs)
        finally:
            device.range_pop()

    return wrapped  # type: ignore[return-value]
