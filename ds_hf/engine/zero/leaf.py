"""Leaf modules: modules whose parameters are always gathered together (DeepSpeed's ``set_z3_leaf_modules``).

Mixture-of-experts blocks need it where ranks may call different experts. The mark is an attribute of the module,
so it survives until the engine is built and is read once, by ``planning``.

Where a model chooses among alike children by its data (experts of a mixture), ranks may call different ones. Nothing in
a module tree says so; what does in practice are the words people use (``experts``, ``MoE``), a router beside the list
(``gate``, ``router``), or a layer beside it that has one output for each child (``find_choices``). Taking a list of
layers for experts costs memory (what holds it is gathered as one), missing experts is a hang.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import nn

from ds_hf.engine.zero.buffer import logical_shape
from ds_hf.log import warn_once

__all__ = [
    "Choice",
    "find_choices",
    "get_z3_leaf_modules",
    "holder_of",
    "is_container",
    "is_leaf",
    "mark_leaves",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
    "z3_leaf_parameter",
]

_MARK = "_z3_leaf"


def is_leaf(module: nn.Module) -> bool:
    """Whether the module was marked as a leaf."""
    return bool(module.__dict__.get(_MARK, False))


z3_leaf_module = is_leaf


def z3_leaf_parameter(param: nn.Parameter) -> bool:
    """Whether the parameter lives in a unit of a leaf module."""
    return bool(getattr(param, "ds_z3_leaf_module", None) is not None)


def set_z3_leaf_module(module: nn.Module, flag: bool) -> None:
    """Mark one module as a leaf, or take the mark away."""
    module.__dict__[_MARK] = flag


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark all modules of the given classes (or class names, bare or qualified) as leaves.

    Returns the modules marked.

    Raises:
        ValueError: no module is of any of the classes.
    """
    found = _of_classes(model, leaf_module_classes, raise_if_not_found)
    for module in found:
        set_z3_leaf_module(module, True)
    return found


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules of the given paths. Returns those marked, and the paths that do not exist.

    Raises:
        ValueError: none of the paths exists.
    """
    named = dict(model.named_modules())
    return _mark_all(model, {name: [name] if name in named else [] for name in module_names}, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules whose paths end in one of the suffixes. Returns those marked, and the suffixes of none.

    Raises:
        ValueError: no path ends in one of them.
    """
    paths = [name for name, _ in model.named_modules()]
    ends = {suffix: [path for path in paths if path.endswith(suffix)] for suffix in module_name_suffixes}
    return _mark_all(model, ends, raise_if_not_found)


def _mark_all(
    model: nn.Module, paths: dict[str, list[str]], raise_if_not_found: bool
) -> tuple[list[nn.Module], list[str]]:
    named = dict(model.named_modules())
    found = [named[path] for path in dict.fromkeys(path for of in paths.values() for path in of)]
    if not found and raise_if_not_found:
        raise ValueError(f"{type(model).__name__} has no module {', '.join(paths)}")
    for module in found:
        set_z3_leaf_module(module, True)
    return found, [name for name, of in paths.items() if not of]


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Take the mark away from all modules of the given classes; returns them.

    Raises:
        ValueError: no module is of any of the classes.
    """
    found = _of_classes(model, leaf_module_classes, raise_if_not_found)
    for module in found:
        set_z3_leaf_module(module, False)
    return found


def _of_classes(
    model: nn.Module, classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool
) -> list[nn.Module]:
    found = [module for module in model.modules() if _matches(module, classes)]
    if not found and raise_if_not_found:
        raise ValueError(f"no module of {type(model).__name__} is of class {[_name(c) for c in classes]}")
    return found


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """All marked modules."""
    return [module for module in model.modules() if is_leaf(module)]


def mark_leaves(
    model: nn.Module, classes: Sequence[str], names: Sequence[str], name_suffixes: Sequence[str]
) -> list[nn.Module]:
    """Mark what the JSON's ``zero_optimization.leaf_module`` names. Names that do not occur are told; classes are
    passed over, for there is a list of them by default."""
    marked = []
    paths = [name for name, _ in model.named_modules()]
    missing = [name for name in names if name not in paths]
    missing += [suffix for suffix in name_suffixes if not any(path.endswith(suffix) for path in paths)]
    if missing:
        text = f"zero_optimization.leaf_module: no module of {type(model).__name__} is called {', '.join(missing)}"
        warn_once(f"{text}, or ends in it")
    for name, module in model.named_modules():
        by_name = name in names or any(name.endswith(suffix) for suffix in name_suffixes)
        if by_name or _matches(module, classes):
            set_z3_leaf_module(module, True)
            marked.append(module)
    return marked


def _name(cls: type | str) -> str:
    return cls if isinstance(cls, str) else cls.__qualname__


def _matches(module: nn.Module, classes: Sequence[type[nn.Module] | str]) -> bool:
    own = type(module)
    names = {own.__name__, own.__qualname__, f"{own.__module__}.{own.__qualname__}"}
    return any(cls in names if isinstance(cls, str) else isinstance(module, cls) for cls in classes)


# -- experts -----------------------------------------------------------------------------------------------------------


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
