"""Logits that are computed when they are looked at: a loss may then do without most of them.

They are what a head gives while its model computes its training loss, and have the shape, dtype and device of the
logits. The one loss that knows them takes them apart; any other operator gets the logits themselves, so a model that
scales or caps them before its loss is right and only saves less.

``DeferredLogits`` are hidden states and a head. ``PartialLogits`` are those of the words that are here, of a head whose
vocabulary is cut over the tensor axis; looking at them gathers the others, so all processes of the axis have to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ds_hf.engine.parallel.tensor.functions import gather_last
from ds_hf.engine.parallel.tensor.styles import ColwiseGathered, part_of_outputs

__all__ = ["DeferredHead", "DeferredLogits", "PartialHead", "PartialLogits", "product_dtype"]

_METADATA = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad")),
    *(getattr(Tensor, name).__get__ for name in ("is_cuda", "is_leaf", "grad_fn", "is_sparse")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.is_floating_point),
    *(Tensor.__len__, Tensor.is_complex, Tensor.get_device, Tensor.__hash__),
}


def product_dtype(device: torch.device, given: torch.dtype) -> torch.dtype:
    """In which a matrix product of ``given`` is computed on ``device``: autocast's, where it is on."""
    kind = device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):  # the meta device has none
        return given
    return torch.get_autocast_dtype(kind)


class _Lazy(Tensor):
    """Attributes:
    made: the logits, once they were asked for. traced: with what autograd needs.
    """

    made: Tensor | None = None
    traced = False

    def _make(self) -> Tensor:
        raise NotImplementedError

    def compute(self) -> Tensor:
        """The logits."""
        if self.made is None or (torch.is_grad_enabled() and not self.traced):  # a metric looked first, without
            self.made, self.traced = self._make(), torch.is_grad_enabled()
        return self.made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _METADATA:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        args, kwargs = tree_map(_computed, args), tree_map(_computed, kwargs or {})
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map(_computed, args), tree_map(_computed, kwargs or {})
        return func(*args, **kwargs)


def _computed(value: Any) -> Any:
    return value.compute() if isinstance(value, _Lazy) else value


class DeferredLogits(_Lazy):
    """``head(hidden)``, not computed yet.

    Attributes:
        hidden: ``[..., hidden]``. head: the linear layer.
        looked: called when they are computed although the loss did without. spent: it did.
    """

    hidden: Tensor
    head: nn.Linear
    looked: Callable[[], None]
    spent = False

    @staticmethod
    def __new__(
        cls: type[DeferredLogits], hidden: Tensor, head: nn.Linear, looked: Callable[[], None]
    ) -> DeferredLogits:
        dtype = product_dtype(hidden.device, hidden.dtype)
        shape = (*hidden.shape[:-1], head.out_features)
        deferred = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=hidden.device)
        deferred.hidden, deferred.head, deferred.looked = hidden, head, looked
        return deferred

    def _make(self) -> Tensor:
        if self.spent:
            self.looked()
        return self.head(self.hidden)  # type: ignore[no-any-return]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DeferredLogits({tuple(self.hidden.shape[:-1])}, {self.head})"


class PartialLogits(_Lazy):
    """``head(hidden)``, not gathered yet.

    Attributes:
        part: ``[..., vocabulary / processes]``, of the words that are here. head: the cut layer.
    """

    part: Tensor
    head: ColwiseGathered

    @staticmethod
    def __new__(cls: type[PartialLogits], part: Tensor, head: ColwiseGathered) -> PartialLogits:
        shape = (*part.shape[:-1], part.shape[-1] * head._ds_place.axis.world_size)
        partial = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=part.dtype, device=part.device)
        partial.part, partial.head = part, head
        return partial

    def _make(self) -> Tensor:
        return gather_last(self.part, self.head._ds_place)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PartialLogits({tuple(self.part.shape)} of {self.head._ds_place.axis.world_size})"


class DeferredHead:
    """Stands for a head while its logits are deferred."""

    def __init__(self, head: Any, looked: Callable[[], None] = lambda: None) -> None:
        self._head, self._looked = head, looked

    def __call__(self, hidden: Tensor) -> Tensor:
        return DeferredLogits(hidden, self._head, self._looked)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)


class PartialHead(DeferredHead):
    """Stands for a cut head whose outputs are not gathered."""

    def __call__(self, hidden: Tensor) -> Tensor:
        return PartialLogits(part_of_outputs(self._head, hidden), self._head)
