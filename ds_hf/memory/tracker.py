"""Bytes of live tensors on the meta device while a model runs: what a GPU would hold, op by op.

A storage counts from the op that made it until its last tensor dies, rounded up as CUDA's caching allocator rounds.
Storages named by ``ignore`` (the parameters) never count: the plan says what they take.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
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
        self._known: dict[int, tuple[weakref.ref[Any], list[int]]] = {}  # -> (storage, [kind, bytes, counts])
        self._results = _Results()

    def ignore(self, tensor: Tensor) -> None:
        """Do not count the tensor's storage."""
        self._remember(tensor.untyped_storage(), Kind.ACTIVATIONS, counts=False)

    def relabel(self, tensor: Tensor, kind: Kind) -> None:
        """The tensor's storage is of another kind from now on."""
        for part in _tensors(tensor):
            self._relabel(part, kind)

    def _relabel(self, tensor: Tensor, kind: Kind) -> None:
        entry = self._known.get(tensor.untyped_storage()._cdata)
        if entry is not None:
            cell = entry[1]
            self.live[cell[0]] -= cell[1]
            cell[0] = kind
            self.live[kind] += cell[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _SCALAR and args[0].is_meta:
            # "Is the mask all ones?", "are there as many tokens as features?": batches without padding take the most.
            return True if args[0].dtype is torch.bool else 1
        result = self._results(func, args, kwargs or {})
        for tensor in _tensors(result):
            self._see(tensor)
        self._on_change(self.live, workspace(func, args))
        return result

    def _see(self, tensor: Tensor) -> None:
        if not tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        entry = self._known.get(storage._cdata)
        if entry is not None:
            self._measure(storage, entry[1])  # it may have grown: by resize_(), or as the "out" of an operator
            return
        computing = torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled()
        wide = self._wide and tensor.dim() > 1 and tensor.shape[-1] == self._wide
        kind = Kind.LOGITS if wide else Kind.ACTIVATIONS if computing else Kind.TEMPORARY
        self._remember(storage, kind)

    def _measure(self, storage: Any, cell: list[int]) -> None:
        nbytes = rounded(storage.nbytes()) * cell[2]
        self.live[cell[0]] += nbytes - cell[1]
        cell[1] = nbytes

    def _remember(self, storage: Any, kind: Kind, *, counts: bool = True) -> None:
        key = storage._cdata
        cell = [int(kind), 0, int(counts)]
        self._measure(storage, cell)

        def gone(_: Any) -> None:
            self.live[cell[0]] -= cell[1]
            self._known.pop(key, None)

        self._known[key] = (weakref.ref(storage, gone), cell)


class _Results:
    """What operators give on the meta device, remembered by what they were given: layers ask the same again and again.

    torch infers most shapes in Python, operator by operator, which was three quarters of a recording. Operators that
    give a part of an argument or another form to it, as their schema or their first result says, are called each time.
    """

    def __init__(self) -> None:
        self._found: dict[Any, Any] = {}

    def __call__(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        writes = _writes_first(func)
        if writes is None:
            return func(*args, **kwargs)
        try:
            key = func, torch.get_default_dtype(), _key(args), _key(tuple(kwargs.items()))
        except TypeError:
            return _OTHERWISE.get(func, func)(*args, **kwargs)
        layout = self._found.get(key)
        if layout is None:
            result = _OTHERWISE.get(func, func)(*args, **kwargs)
            alike = result is args[0] if writes else _is_new(result, (args, kwargs))
            self._found[key] = _layout(result) if alike else _UNKNOWN
            return result
        if layout is _UNKNOWN:
            return func(*args, **kwargs)
        return args[0] if writes else _made(layout)


def _grouped(first: Tensor, second: Tensor, *more: Any, **named: Any) -> Tensor:
    """``_grouped_mm`` of any floating dtype, as CUDA's; what torch knows of the meta device is of bf16 alone."""
    product: Tensor = torch.ops.aten._grouped_mm.default(_in_bf16(first), _in_bf16(second), *more, **named)
    return product.to(first.dtype)


def _in_bf16(x: Tensor) -> Tensor:
    """As many bytes between rows as in ``x``: torch wants multiples of 16, as four numbers of fp32 are, not of bf16."""
    strides = [stride if stride == 1 else stride * x.element_size() // 2 for stride in x.stride()]
    return torch.empty_strided(x.shape, strides, dtype=torch.bfloat16, device="meta")


def _clone(tensor: Tensor, **named: Any) -> Tensor:
    """Of a sparse tensor with its rows, as gradients are that autograd puts in place; torch's has none here."""
    if tensor.layout is not torch.sparse_coo:
        return torch.ops.aten.clone.default(tensor, **named)  # type: ignore[no-any-return]
    indices, values = (part.clone() for part in _parts(tensor))
    return torch.sparse_coo_tensor(indices, values, tensor.shape, check_invariants=False)


_OTHERWISE = {torch.ops.aten._grouped_mm.default: _grouped, torch.ops.aten.clone.default: _clone}
_UNKNOWN = object()
_PLAIN = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}


@cache
def _writes_first(func: Any) -> bool | None:
    """False where an operator makes what it returns, True where it returns its first argument, written to, and else
    ``None``, as with views; also of operators that are not torch's, whose shapes may depend on anything."""
    schema = func._schema
    if func.namespace not in ("aten", "ds_hf"):
        return None
    aliases = [each.alias_info for each in (*schema.arguments, *schema.returns)]
    if not any(aliases):
        return False if schema.returns else None
    written = [index for index, alias in enumerate(aliases) if alias]
    inplace = written == [0, len(schema.arguments)] and aliases[0].is_write and len(schema.returns) == 1
    return True if inplace and torch.Tag.inplace_view not in func.tags else None


def _is_new(result: Any, given: Any) -> bool:
    """Whether each tensor of a result has a storage of its own, and no larger one than it needs."""
    known = {tensor.untyped_storage()._cdata for tensor in _tensors(given)}
    for tensor in _tensors(result):
        storage = tensor.untyped_storage()
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        elements = 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0
        if storage._cdata in known or storage.nbytes() != elements * tensor.itemsize:
            return False
        known.add(storage._cdata)
    return True


def _key(value: Any) -> Any:
    """What the layout of a result depends on, of an argument.

    Raises:
        TypeError: this is not known of such an argument.
    """
    kind = type(value)
    if (kind is Tensor or kind is nn.Parameter) and value.is_meta and value.layout is torch.strided:
        return value.shape, value.stride(), value.dtype
    if kind is tuple or kind is list:
        return tuple([_key(each) for each in value])
    if kind in _PLAIN:
        return kind, value  # 1, 1.0 and True are equal, and give other dtypes
    raise TypeError(kind)


def _layout(result: Any) -> Any:
    """A result without its memory, tensors by shape, strides and dtype; ``_UNKNOWN`` with anything else in it."""
    if type(result) is Tensor and result.is_meta and result.layout is torch.strided:
        return result.shape, result.stride(), result.dtype
    if type(result) is tuple:
        parts = [each if each is None or type(each) is int else _layout(each) for each in result]
        return _UNKNOWN if _UNKNOWN in parts else parts
    return _UNKNOWN


def _made(layout: Any) -> Any:
    if type(layout) is list:
        return tuple([_made(each) for each in layout])
    if type(layout) is tuple:
        return torch.empty_strided(layout[0], layout[1], dtype=layout[2], device="meta")
    return layout


def _tensors(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield from (result,) if result.layout is torch.strided else _parts(result)
    elif result is not None:
        yield from (part for leaf in tree_leaves(result) if isinstance(leaf, Tensor) for part in _tensors(leaf))


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensors that hold a sparse one, as gradients of ``nn.Embedding(sparse=True)`` are."""
    return (tensor._indices(), tensor._values()) if tensor.layout is torch.sparse_coo else ()
