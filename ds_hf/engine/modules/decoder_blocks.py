"""The list of a model's blocks, some of which drop tokens or are left out, and which call of the model it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ds_hf.engine.zero.hooks import Hook
from ds_hf.engine.zero.unit import in_backward
from ds_hf.errors import ConfigError

__all__ = ["Calls", "find_blocks"]

_MARK = "_ds_hf_call"  # of hidden states: which call of the model made them


class _Engine(Protocol):
    module: nn.Module
    global_steps: int


class Calls:
    """Counts calls of an engine's model while it trains.

    Attributes:
        step: the step, from 0; -1 before the first call.
        number: of the call in this step, from 1; 0 before the first.
    """

    def __init__(self, engine: _Engine, began: Callable[[bool], None]) -> None:
        self.engine, self.began = engine, began
        self.step, self.number = -1, 0
        self._inside = (
            False  # a call that trains: checkpoints that are reentrant compute blocks without gradients in it
        )
        self._known: dict[tuple[int, int], int] = {}  # of inputs that such a checkpoint keeps, by block and address
        self._handles = (
            engine.module.register_forward_pre_hook(Hook(self._begin), prepend=True),
            engine.module.register_forward_hook(Hook(self._end), always_call=True),
        )

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._inside = module.training and torch.is_grad_enabled()
        if not self._inside:
            return
        new = self.step != self.engine.global_steps
        self.step, self.number = self.engine.global_steps, 1 if new else self.number + 1
        if new:
            self._known.clear()
        self.began(new)

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._inside = False

    def of(self, block: nn.Module, hidden: Any) -> int:
        """Which call ``hidden``, the input of ``block``, belongs to; 0 where nothing trains. A block that is computed
        again in backward finds what it found the first time."""
        trains = block.training and (torch.is_grad_enabled() or self._inside)
        if not (trains and isinstance(hidden, Tensor)):
            return 0
        if in_backward():
            marked: int | None = getattr(hidden, _MARK, None)
            return marked or self._known.get((id(block), hidden.data_ptr()), self.number)
        call = int(getattr(hidden, _MARK, self.number))
        setattr(hidden, _MARK, call)
        if not torch.is_grad_enabled():
            self._known[id(block), hidden.data_ptr()] = call
        return call

    def close(self) -> None:
        """Count no more."""
        for handle in self._handles:
            handle.remove()


def find_blocks(model: nn.Module, pointer: str, count: int | None = None, kind: type | None = None) -> list[nn.Module]:
    """The blocks of ``model``, in order: its longest list of modules of one parent, or those of a class.

    Args:
        pointer: of the key that asks, for the sentence.
        count: how many there are, if the configuration says so.
        kind: their class, where a script names it.

    Raises:
        ConfigError: there is no such list, or there are several.
    """
    if kind is not None:
        found = [module for module in model.modules() if isinstance(module, kind)]
        lists = {kind.__name__: found} if found else {}
    else:
        lists = {
            name: list(module)
            for name, module in model.named_modules()
            if isinstance(module, nn.ModuleList | nn.Sequential)
            and len(module) > 1
            and all(any(b.children()) for b in module)
        }
    sizes = {name: len(blocks) for name, blocks in lists.items()}
    if count is not None:
        lists = {name: blocks for name, blocks in lists.items() if len(blocks) == count}
    longest = max(map(len, lists.values()), default=0)
    best = [name for name, blocks in lists.items() if len(blocks) == longest]
    if len(best) == 1:
        return lists[best[0]]
    there = ", ".join(f"{name} ({size})" for name, size in sizes.items()) or "none"
    asked = "" if count is None else f" of {count} blocks"
    raise ConfigError(
        f"{type(model).__name__} has {'several lists' if best else 'no list'}{asked} to choose from: there "
        f"are {there}. Give total_layer_num as one of them has it",
        pointer,
    )
