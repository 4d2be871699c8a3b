"""Where a model's checkpointed blocks are, and how an offload gets around them.

Models of transformers call ``module._gradient_checkpointing_func(function, *args)``, which
``activation_checkpointing_enable`` sets anew, before or after ``initialize``. So the model is looked at when it is
called. Whatever checkpoints, reentrant or not, saves its inputs through the hooks of the offload and nothing else. So
does a compiled block that has its checkpoint inside the graph: there the offload is around the compiled function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ds_hf.engine.modules.activations.offload import ActivationOffload
from ds_hf.engine.modules.compiling import StandIn
from ds_hf.engine.zero.unit import in_backward
from ds_hf.log import warn_once

__all__ = ["BlockOffload", "attach", "longest_list"]

_FUNCTION = "_gradient_checkpointing_func"


def attach(engine: Any) -> None:
    """Offload the inputs of the checkpointed blocks of an engine's model, if the configuration says so."""
    settings = engine.settings
    if settings.activation_checkpointing.cpu_checkpointing or settings.ds_hf.offload_activations:
        offload = ActivationOffload(engine.device, alike=longest_list(engine.module))
        engine.hooks.handles.append(BlockOffload(engine.module, offload))


class BlockOffload:
    """Puts ``offload`` around the checkpointed blocks of ``model``; ``remove`` takes it away."""

    def __init__(self, model: nn.Module, offload: ActivationOffload) -> None:
        self.offload = offload
        self._blocks = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
        self._began: int | None = None
        self._handles = [
            model.register_forward_pre_hook(lambda module, args: self._before(module)),
            model.register_forward_hook(lambda module, args, output: self._after()),
        ]

    @property
    def note(self) -> str:
        """For the line with which a run begins."""
        checkpoints = any(block.gradient_checkpointing for block in self._blocks)
        return "activations in host memory" if checkpoints else ""

    def _before(self, model: nn.Module) -> None:
        if not (model.training and torch.is_grad_enabled()) or in_backward():
            return
        if self._began is None:
            self._began = ActivationOffload.rounds
        for block in self._blocks:
            given = block.__dict__.get(_FUNCTION)
            if given is not None and not (isinstance(given, Offloading) and given.offload is self.offload):
                block.__dict__[_FUNCTION] = Offloading(_own(given), self.offload)
            compiled = block.__dict__.get("forward")
            if not block.gradient_checkpointing or not isinstance(compiled, StandIn):
                continue
            if not isinstance(compiled.call, _Around):
                compiled.call = _Around(compiled.call, self.offload)

    def _after(self) -> None:
        if self._began is not None and self._began == ActivationOffload.rounds:
            warn_once(
                "activations stay on the device: the model checkpoints none. Switch gradient checkpointing on "
                "(gradient_checkpointing=True in TrainingArguments, or model.gradient_checkpointing_enable()), or "
                "remove activation_checkpointing.cpu_checkpointing"
            )
        if self._began is not None:
            self._began = -1  # told, or not to be told

    def remove(self) -> None:
        """Give the blocks their own function back, and the host its memory."""
        for handle in self._handles:
            handle.remove()
        for block in self._blocks:
            given = block.__dict__.get(_FUNCTION)
            if isinstance(given, Offloading) and given.offload is self.offload:
                block.__dict__[_FUNCTION] = given.given
            compiled = block.__dict__.get("forward")
            if isinstance(compiled, StandIn) and isinstance(compiled.call, _Around):
                compiled.call = compiled.call.given
        self.offload.close()


class Offloading:
    """A function that checkpoints, with an offload around it. A copy of the model has the function alone.

    Args:
        given: ``given(function, *args, **kwargs)``, as ``torch.utils.checkpoint.checkpoint``.
    """

    def __init__(self, given: Callable[..., Any], offload: ActivationOffload) -> None:
        self.given, self.offload = given, offload

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or in_backward():
            return self.given(function, *args, **kwargs)
        with self.offload.around(args):
            return self.given(function, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, tuple[Any]]:
        return _itself, (self.given,)


class _Around:
    """A compiled block with an offload around it, unless its checkpoint is around it and has one."""

    def __init__(self, given: Callable[..., Any], offload: ActivationOffload) -> None:
        self.given, self.offload = given, offload

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.offload.inside or not torch.is_grad_enabled() or in_backward():
            return self.given(*args, **kwargs)
        with self.offload.around(args):
            return self.given(*args, **kwargs)


def _itself(given: Any) -> Any:
    return given


def _own(given: Any) -> Any:
    return given.given if isinstance(given, Offloading) else given


def longest_list(model: nn.Module) -> int:
    """How many blocks the model has, as far as its lists tell."""
    return max((len(module) for module in model.modules() if isinstance(module, nn.ModuleList)), default=1) or 1
