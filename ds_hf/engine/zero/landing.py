"""Parameters whose new values are on the way: stages 1 and 2 gather them beside the next forward.

Between ``step`` and the use of a unit its parameters are of a class of their own. Whoever touches one, other than to
ask for what is not its values, waits first - the current stream does, not the host - and finds an ordinary parameter.
Tensors that share a parameter's memory cannot be guarded so: where there are such, nothing is put off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["can_land_later", "landed", "take_off"]

# What may be asked of a parameter before its values are there: its gradient, its form, hooks.
_FORM = ("device", "dtype", "grad", "is_cuda", "is_leaf", "ndim", "requires_grad", "shape")
_HARMLESS = {
    *(getattr(Tensor, name).__get__ for name in _FORM),
    *(getattr(vars(torch._C.TensorBase)["grad"], name) for name in ("__set__", "__delete__")),
    *(Tensor.size, Tensor.numel, Tensor.dim, Tensor.nelement, Tensor.element_size),
    *(Tensor.is_floating_point, Tensor.is_complex, torch.is_floating_point, torch.is_complex),
}


class _Landing(nn.Parameter):
    """A parameter whose values are on the way. ``_ds_land`` makes it an ordinary one."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _HARMLESS:
            for tensor in _landing_in((args, kwargs)):
                if type(tensor) is _Landing:  # one lands with all of its unit
                    tensor.__dict__["_ds_land"]()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def can_land_later(params: Iterable[nn.Parameter]) -> bool:
    """Whether all are ordinary parameters."""
    return all(type(param) is nn.Parameter for param in params)


def take_off(params: Iterable[nn.Parameter], land: Callable[[], None]) -> None:
    """From now on ``land`` is called before anybody touches one of ``params``; it must call ``landed``."""
    for param in params:
        param.__dict__["_ds_land"] = land
        param.__class__ = _Landing


def landed(params: Iterable[nn.Parameter]) -> None:
    """They are ordinary parameters again."""
    for param in params:
        if type(param) is _Landing:
            param.__class__ = nn.Parameter  # type: ignore[assignment]
            del param.__dict__["_ds_land"]


def _landing_in(value: Any) -> list[_Landing]:
    if type(value) is _Landing:
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [tensor for item in value for tensor in _landing_in(item)]
