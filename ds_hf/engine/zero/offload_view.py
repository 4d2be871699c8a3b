"""``engine.optimizer.parameter_offload``: the names under which TRL finds DeepSpeed's hooks around generation.

TRL gathers all parameters, takes the hooks off, generates and registers them again. Here the hooks may stay: they find
everything gathered, and ``GatheredParameters`` holds it. So there is nothing to take off.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from ds_hf.engine.zero.external import external_parameters

__all__ = ["ExternalParameters", "ParameterOffload"]


class ParameterOffload:
    """What holds the hooks of ``module``, as far as other libraries look at it."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        """The hooks of ``module`` were never gone."""


class ExternalParameters:
    """``module.ds_external_parameters()``: pairs of a name and a parameter registered with ``module``."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((str(id(param)), param) for param in external_parameters(self.module))
