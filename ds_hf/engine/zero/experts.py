"""Where a model chooses among alike children by its data: experts of a mixture, of which ranks may call different ones.

Nothing in a module tree says so; what does in practice are the words people use (``experts``, ``MoE``), a router beside
the list (``gate``, ``router``), or a layer beside it that has one output for each child. Taking a list of layers for
experts costs memory (what holds it is gathered as one), missing experts is a hang.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from torch import nn

from ds_hf.engine.zero.buffer import logical_shape

__all__ = ["Choice", "find_choices", "holder_of", "is_container"]

_LIST = re.compile(r"expert|mixture", re.IGNORECASE)
_CHILD = re.compile(r"expert(?!s)", re.IGNORECASE)
_HOLDER = re.compile(r"expert|mixture|switch|router|MoE|Moe(?![a-z])", 0)
_ROUTER = re.compile(r"(^|_)(gates?|gating|router?|routing|switch|dispatch(er)?)(_|\d|$)", re.IGNORECASE)
_IN_TURN = re.compile(r"(^|_)(layers?|blocks?|stages?|h)$", re.IGNORECASE)


class Choice(NamedTuple):
    """Names: a container of alike modules, and the module whose forward chooses among them."""

    container: str
    holder: str


def find_choices(model: nn.Module) -> list[Choice]:
    """The lists of experts of a model, and its dictionaries of heads."""
    named = dict(model.named_modules())
    declared = {
        class_name
        for module in named.values()
        for class_name in (getattr(module, "_no_split_modules", None) or ())
        if isinstance(class_name, str)
    }
    found: list[Choice] = []
    for name, module in reversed(named.items()):  # what is inside comes first
        if not (name and isinstance(module, nn.ModuleList | nn.ModuleDict) and len(module) > 1):
            continue
        kinds = {type(child) for child in module.children()}
        holder = holder_of(named, name)
        if len(kinds) > 1 or next(iter(kinds)).__name__ in declared:
            continue
        if any(choice.holder.startswith(name + ".") for choice in found):
            continue  # a list of modules that choose, called in turn
        if _chooses(name.rpartition(".")[2], module, named[holder], whole=not holder):
            found.append(Choice(name, holder))
    return found


def is_container(module: nn.Module) -> bool:
    """It has no forward to hook (a list in a list): what it holds is called instead."""
    return type(module).forward is nn.Module.forward


def holder_of(named: Mapping[str, nn.Module], name: str) -> str:
    """The nearest module above ``name`` that has a forward; the root ``""`` at last."""
    holder = name.rpartition(".")[0]
    while holder and is_container(named[holder]):
        holder = holder.rpartition(".")[0]
    return holder


def _chooses(name: str, children: nn.Module, holder: nn.Module, *, whole: bool) -> bool:
    if _LIST.search(name):
        return True
    if _IN_TURN.search(name):
        return False
    listed = list(children.children())
    if isinstance(children, nn.ModuleDict) and not any(True for child in listed for _ in child.children()):
        return True  # a head for each task
    if _CHILD.search(type(listed[0]).__name__) or _HOLDER.search(type(holder).__name__):
        return True
    beside = [key for key, module in holder._modules.items() if module is not children]
    beside += [key for key, param in holder._parameters.items() if param is not None]
    if any(_ROUTER.search(key) for key in beside):
        return True
    # One output for each child; of a whole model that may be its classifier.
    linears = [module for module in holder.children() if type(module).__name__ == "Linear"]
    return not whole and any(logical_shape(linear.weight)[0] == len(listed) for linear in linears)  # type: ignore[arg-type]
