"""Weights that another module's forward reads: ``hidden @ self.lm_head.weight.t()``, as fused losses do.

A leaf of the model that is a unit by itself tells the hooks when one of its parameters is read by name while none of
its calls is open; they gather the unit until the model's call is over. Parameters inside blocks are read too often: a
``__getitem__`` in Python costs the host as much as half a view. Blocks have to be called, or registered as external.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ds_hf.engine.zero.unit import Unit

__all__ = ["unwatch", "watch"]


class _Watched(dict[str, nn.Parameter | None]):
    """``module._parameters`` that tells of reads outside the module's own calls. Its copies are ordinary dicts.

    Only ``module.weight`` and its like come through here; ``parameters()``, ``state_dict()`` and ``.get()`` do not.
    """

    __slots__ = ("on_read", "unit")

    def __init__(self, given: dict[str, nn.Parameter | None], unit: Unit, on_read: Callable[[Unit, Any], None]) -> None:
        super().__init__(given)
        self.unit, self.on_read = unit, on_read

    def __getitem__(self, name: str) -> nn.Parameter | None:
        param = super().__getitem__(name)
        if not self.unit.depth:
            self.on_read(self.unit, param)
        return param

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def watch(unit: Unit, on_read: Callable[[Unit, Tensor | None], None]) -> bool:
    """Have ``on_read`` called when a parameter of ``unit.module`` is read by name while no call of ``unit`` is open.

    Code that is being compiled breaks its graph there: what the reader gathers is no part of a graph.

    Returns:
        whether the unit is watched: it is sharded, and a module without children.
    """
    module = unit.module
    if not unit.name or not unit.sharded or any(True for _ in module.children()):
        return False
    eagerly: Callable[[Callable[..., None]], Any] = torch.compiler.disable
    module.__dict__["_parameters"] = _Watched(module._parameters, unit, eagerly(on_read))
    return True


def unwatch(module: nn.Module) -> None:
    """Give the module an ordinary ``_parameters`` again, unless somebody else has replaced it."""
    if type(module._parameters) is _Watched:
        module.__dict__["_parameters"] = dict(module._parameters)
