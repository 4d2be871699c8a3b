"""Counts the bytes of tensors that are alive, where there is no allocator to ask: on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["LiveBytes"]


class LiveBytes(TorchDispatchMode):
    """Inside, every storage that an operator makes is followed until it is gone.

    Args:
        counts: whether a tensor is counted; default all.

    Attributes:
        peak: the most that was alive after any operator.
    """

    def __init__(self, counts: Callable[[Tensor], bool] = lambda tensor: True) -> None:
        super().__init__()
        self.counts, self.peak = counts, 0
        self._found: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and self.counts(tensor):
                storage = tensor.untyped_storage()
                known = self._found.get(storage._cdata)
                if known is None or known[0].expired():
                    self._found[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.now())
        return output

    def now(self) -> int:
        """Bytes that are alive."""
        self._found = {key: found for key, found in self._found.items() if not found[0].expired()}
        return sum(nbytes for _, nbytes in self._found.values())


def lies_in(tensor: Tensor, memory: Tensor) -> bool:
    """Whether ``tensor`` is a view of ``memory``."""
    start = memory.data_ptr()
    return bool(start <= tensor.data_ptr() < start + memory.nbytes)
