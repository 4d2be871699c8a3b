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
