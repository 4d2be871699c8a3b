"""``param.comm_dtype``: the dtype in which the gradient of a single parameter is reduced, where it is not that of all.

Set when an engine is built, for parameters of the classes that ``torch_autocast`` calls safe, and read when parameters
are laid out: those of one flat buffer have the same. A parameter without the attribute is reduced as the others are.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from ds_hf.errors import ConfigError, Fault

__all__ = [
    "COMM_DTYPE",
    "find_classes",
    "get_all_comm_dtypes",
    "get_comm_dtype",
    "has_comm_dtype",
    "mark_comm_dtypes",
    "sort_dtypes",
]

COMM_DTYPE = "comm_dtype"
_POINTER = "/torch_autocast/lower_precision_safe_modules"


def mark_comm_dtypes(model: nn.Module, class_names: Sequence[str], dtype_name: str | None) -> None:
    """Have the gradients of modules of exactly these classes reduced in a dtype; what an earlier engine set goes.

    Args:
        class_names: with their packages, ``"torch.nn.Linear"``.
        dtype_name: torch's name of the dtype, ``None`` for none.

    Raises:
        ConfigError: there is no such class.
    """
    for param in model.parameters():
        if has_comm_dtype(param):
            delattr(param, COMM_DTYPE)
    if dtype_name is None:
        return
    classes = find_classes(class_names)
    for module in model.modules():
        if type(module) in classes:
            for param in module.parameters(recurse=False):
                if param.is_floating_point():
                    setattr(param, COMM_DTYPE, getattr(torch, dtype_name))


def find_classes(names: Sequence[str]) -> set[type]:
    """The classes of these names.

    Raises:
        ConfigError: one cannot be imported, or is not a class.
    """
    found, faults = set(), []
    for index, name in enumerate(names):
        package, _, class_name = name.rpartition(".")
        try:
            value = getattr(importlib.import_module(package), class_name)
        except (ImportError, AttributeError, ValueError) as error:
            value = error
        if isinstance(value, type):
            found.add(value)
        else:
            why = f": {value}" if isinstance(value, Exception) else ""
            message = f'there is no class "{name}"{why}'
            faults.append(Fault(f"{_POINTER}/{index}", message, 'name a class that can be imported: "torch.nn.Linear"'))
    if faults:
        raise ConfigError(faults)
    return found


# -- under DeepSpeed's names ------------------------------------------------------------------------------------------


def has_comm_dtype(param: Tensor) -> bool:
    """Whether the parameter's gradient is reduced in a dtype of its own."""
    return hasattr(param, COMM_DTYPE)


def get_comm_dtype(param: Tensor) -> torch.dtype:
    """That dtype, or the parameter's."""
    found: torch.dtype = getattr(param, COMM_DTYPE, param.dtype)
    return found


def get_all_comm_dtypes(params: Iterable[Tensor]) -> set[torch.dtype]:
    """Of all ``params``."""
    return {get_comm_dtype(param) for param in params}


def sort_dtypes(dtypes: Iterable[torch.dtype]) -> list[torch.dtype]:
    """By name: in one order on all ranks."""
    return sorted(dtypes, key=str)
