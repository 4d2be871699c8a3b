"""Leaf modules: modules whose parameters are always gathered together (DeepSpeed's ``set_z3_leaf_modules``).

Mixture-of-experts blocks need it where ranks may call different experts. The mark is an attribute of the module,
so it survives until the engine is built and is read once, by ``grouping``.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

__all__ = [
    "get_z3_leaf_modules",
    "is_leaf",
    "mark_leaves",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
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
    found = [module for module in model.modules() if _matches(module, leaf_module_classes)]
    if not found and raise_if_not_found:
        raise ValueError(f"no module of {type(model).__name__} is of class {[_name(c) for c in leaf_module_classes]}")
    for module in found:
        set_z3_leaf_module(module, True)
    return found


def unset_z3_leaf_modules(model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str]) -> list[nn.Module]:
    """Take the mark away from all modules of the given classes; returns them."""
    found = [module for module in model.modules() if _matches(module, leaf_module_classes)]
    for module in found:
        set_z3_leaf_module(module, False)
    return found


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """All marked modules."""
    return [module for module in model.modules() if is_leaf(module)]


def mark_leaves(
    model: nn.Module, classes: Sequence[str], names: Sequence[str], name_suffixes: Sequence[str]
) -> list[nn.Module]:
    """Mark what the JSON's ``zero_optimization.leaf_module`` names; classes that do not occur are passed over."""
    marked = []
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
