"""Parts of cut layers that other code reads: ``hidden @ self.lm_head.weight.T`` beside adapters.

Of a trained weight the graph of the loss shows where it was used; of a frozen one, or in a reentrant checkpoint, it
does not. So until the first backward is over, what reads ``layer.weight`` by name outside of the layer's own forward
gets the same values with a node of their own behind them, ``PartRead``. Reading alone (a dtype, a shape) leads nowhere.
Compiled code gets the weight.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ds_hf.engine.parallel.tensor.styles import place_of
from ds_hf.engine.zero.cut import is_cut
from ds_hf.engine.zero.dtensor import reader_of
from ds_hf.engine.zero.external import read_by
from ds_hf.engine.zero.unit import in_backward

__all__ = ["KNOWING", "PartRead", "PartReads"]

KNOWING = {"ds_hf", "deepspeed"}  # packages that know what a part is


class PartRead(torch.autograd.Function):
    """A part ``x``, of any shape and dtype, as the graph shows it; ``seen`` of its node: it was found there.

    Args:
        sign: requires a gradient, and gets none.
        param: id of the parameter, which the node keeps.
        hidden: what is not seen before its backward is put in.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, sign: Tensor, param: int, hidden: set[int]) -> Tensor:
        ctx.param, ctx.hidden, ctx.seen = param, hidden, False
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        if not ctx.seen:
            ctx.hidden.add(ctx.param)
        return grad if ctx.needs_input_grad[0] else None, None, None, None


class PartReads:
    """Watches the cut layers of ``model`` from ``begin`` to ``end``.

    Attributes:
        hidden: ids of parts that were used where no graph shows it, in a reentrant checkpoint.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.hidden = model, set[int]()
        self._watched: list[nn.Module] = []
        self._sign = torch.zeros(0, requires_grad=True)

    def begin(self) -> None:
        """Where it has not begun."""
        if self._watched:
            return
        knowing: dict[int, set[int]] = defaultdict(set)  # by parameter: the modules that compute with it as a part
        for module in self.model.modules():
            if place_of(module) is not None:
                for param in module.parameters():
                    knowing[id(param)].add(id(module))
        for module in _eager(self.model):
            parts = {
                name: knowing[id(param)]
                for name, param in module._parameters.items()
                if param is not None and is_cut(param) and id(param) in knowing
            }
            if parts and reader_of(module) is None:  # a DTensor knows what it is a part of
                read_by(module, partial(self._read, parts))
                self._watched.append(module)

    def end(self) -> None:
        """Where it has begun."""
        while self._watched:
            read_by(self._watched.pop(), None)

    def _read(self, parts: dict[str, set[int]], name: str, param: Any) -> Any:
        if name not in parts or param is None or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return param
        shown = param.requires_grad and not in_backward()  # by the graph
        gathered = getattr(getattr(param, "_ds_divided", None), "local", None) is not None  # whole, in a block for that
        if shown or gathered or _is_known_to(parts[name]):
            return param
        read: Any = PartRead.apply
        found = read(param, self._sign, id(param), self.hidden)
        vars(found).update(vars(param), _ds_read_of=param)  # for those who gather it
        return found


def _is_known_to(modules: set[int]) -> bool:
    """Whether ds_hf reads, or what is called in a forward of ``modules``."""
    frame: Any = sys._getframe(3)  # behind _read, which a dictionary calls
    if frame.f_globals.get("__name__") == nn.Module.__module__:
        frame = frame.f_back
    if str(frame.f_globals.get("__name__")).partition(".")[0] in KNOWING:
        return True
    while frame is not None:
        if id(frame.f_locals.get("self")) in modules:
            return True
        frame = frame.f_back
    return False


def _eager(module: nn.Module) -> Iterator[nn.Module]:
    """``module`` and what is in it, without what is compiled or otherwise computed by ds_hf."""
    own = vars(module).get("forward")  # of others: TRL has the model's forward call its own function
    compiled = type(own).__module__.partition(".")[0] in KNOWING or hasattr(own, "_torchdynamo_orig_callable")
    if module._compiled_call_impl is None and not compiled:
        yield module
        for child in module.children():
            yield from _eager(child)
