"""Parameters that the optimizer has written and that are still being gathered, beside the next forward.

Until its all-gather has been waited for, a parameter is *pending*: it is of a class of its own. Code that touches one,
other than to ask for what is not its values, waits first - the current stream does, not the host - and finds an
ordinary parameter. Tensors that share a parameter's memory cannot be guarded so: where there are such, nothing is
deferred.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

__all__ = ["Pending", "can_be_pending", "mark_arrived", "mark_pending"]

# What may be asked of a parameter before its values are there: its gradient, its form, hooks.
_FORM = ("device", "dtype", "grad", "is_cuda", "is_leaf", "ndim", "requires_grad", "shape")
_HARMLESS = {
    *(getattr(Tensor, name).__get__ for name in _FORM),
    *(getattr(vars(torch._C.TensorBase)["grad"], name) for name in ("__set__", "__delete__")),
    *(Tensor.size, Tensor.numel, Tensor.dim, Tensor.nelement, Tensor.element_size),
    *(Tensor.is_floating_point, Tensor.is_complex, torch.is_floating_point, torch.is_complex),
}


class Pending(nn.Parameter):
    """A parameter whose values are on the way. ``_ds_arrive`` makes it one of the class ``arrived``."""

    arrived: ClassVar[type[nn.Parameter]] = nn.Parameter

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _HARMLESS:
            for tensor in _pending_in((args, kwargs)):
                if isinstance(tensor, Pending):  # one arrives with all of its unit
                    tensor.__dict__["_ds_arrive"]()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        self.__dict__["_ds_arrive"]()  # torch's own asks for the class first
        return copy.deepcopy(self, memo)


def can_be_pending(params: Iterable[nn.Parameter]) -> bool:
    """Whether all are ordinary parameters."""
    return all(type(param) is nn.Parameter for param in params)


def mark_pending(params: Iterable[nn.Parameter], arrive: Callable[[], None]) -> None:
    """From now on ``arrive`` is called before any use of the values of ``params``; it must call ``mark_arrived``."""
    for param in params:
        param.__dict__["_ds_arrive"] = arrive
        param.__class__ = Pending


def mark_arrived(params: Iterable[nn.Parameter]) -> None:
    """They are ordinary parameters again."""
    for param in params:
        if isinstance(param, Pending):
            param.__class__ = type(param).arrived  # type: ignore[assignment]
            del param.__dict__["_ds_arrive"]


def _pending_in(value: Any) -> list[Pending]:
    if isinstance(value, Pending):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [tensor for item in value for tensor in _pending_in(item)]
