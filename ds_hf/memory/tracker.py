"""Bytes of live tensors on the meta device while a model runs: what a GPU would hold, op by op.

A storage counts from the op that made it until its last tensor dies, rounded up as CUDA's caching allocator rounds.
Storages named by ``ignore`` (the parameters) never count: the plan says what they take.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_hf.memory.kernels import workspace

__all__ = ["ALLOCATION", "Kind", "LiveTensors", "rounded"]

ALLOCATION = 512  # bytes: the allocator's smallest block
_SCALAR = torch.ops.aten._local_scalar_dense.default


class Kind(IntEnum):
    """What a live tensor is."""

    ACTIVATIONS = 0  # made by a forward or a recomputation
    LOGITS = 1  # as wide as the vocabulary
    GRADIENTS = 2  # in a parameter's ``.grad``
    TEMPORARY = 3  # made by backward


def rounded(nbytes: int) -> int:
    """What the allocator gives for ``nbytes``."""
    return -(-nbytes // ALLOCATION) * ALLOCATION


class LiveTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts, as long as it is entered.

    Args:
        on_change: called with the bytes by kind, and the extra bytes of a running kernel, when they may have grown.
        wide: size of the last dimension of logits, 0 if there are none.
    """

    def __init__(self, on_change: Callable[[Sequence[int], int], None], wide: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = [0] * len(Kind)
        self._on_change = on_change
        self._wide = wide
        self._known: dict[int, tuple[weakref.ref[Any], list[int]]] = {}  # storage -> (itself, [kind, bytes])

    def ignore(self, tensor: Tensor) -> None:
        """Do not count the tensor's storage."""
        self._remember(tensor.untyped_storage(), Kind.ACTIVATIONS, 0)

    def relabel(self, tensor: Tensor, kind: Kind) -> None:
        """The tensor's storage is of another kind from now on."""
        entry = self._known.get(tensor.untyped_storage()._cdata)
        if entry is not None:
            cell = entry[1]
            self.live[cell[0]] -= cell[1]
            cell[0] = kind
            self.live[kind] += cell[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _SCALAR and args[0].is_meta:
            return 1  # "is the mask all ones?": batches without padding, which take the most
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self._see(tensor)
        self._on_change(self.live, workspace(func, args))
        return result

    def _see(self, tensor: Tensor) -> None:
        if not tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        if storage._cdata in self._known:
            return
        computing = torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled()
        wide = self._wide and tensor.dim() > 1 and tensor.shape[-1] == self._wide
        kind = Kind.LOGITS if wide else Kind.ACTIVATIONS if computing else Kind.TEMPORARY
        self._remember(storage, kind, rounded(storage.nbytes()))

    def _remember(self, storage: Any, kind: Kind, nbytes: int) -> None:
        key = storage._cdata
        cell = [int(kind), nbytes]
        self.live[kind] += nbytes

        def gone(_: Any) -> None:
            self.live[cell[0]] -= cell[1]
            self._known.pop(key, None)

        self._known[key] = (weakref.ref(storage, gone), cell)


def _tensors(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif result is not None:
        yield from (leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
