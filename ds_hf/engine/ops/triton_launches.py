"""Kernels of Triton that others wrote, such as Liger's, where a model runs without values.

They would take address 0 for a tensor's on the meta device, and one such launch ends every later use of the GPU.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

__all__ = ["launching_nothing"]


@contextlib.contextmanager
def launching_nothing() -> Iterator[None]:
    """Triton launches no kernel for tensors on the meta device; what a kernel would write has its shape already."""
    jit = sys.modules.get("triton.runtime.jit")
    if jit is None:  # no kernel can have been made
        yield
        return
    launch = jit.KernelInterface.__getitem__

    def held_back(kernel: Any, grid: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if any(isinstance(value, Tensor) and value.is_meta for value in (*args, *kwargs.values())):
                return None
            return launch(kernel, grid)(*args, **kwargs)

        return call

    jit.KernelInterface.__getitem__ = held_back
    try:
        yield
    finally:
        jit.KernelInterface.__getitem__ = launch
