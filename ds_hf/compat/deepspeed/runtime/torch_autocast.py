"""``deepspeed.runtime.torch_autocast``: ``torch.autocast`` of an engine."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from ds_hf.config.plan import SAFE_MODULES
from ds_hf.engine.casting import autocast_of
from ds_hf.engine.engine import CoreEngine
from ds_hf.engine.zero.comm_dtype import COMM_DTYPE as PARAM_COMM_DTYPE_ATTR_NAME
from ds_hf.engine.zero.comm_dtype import find_classes, get_all_comm_dtypes, get_comm_dtype, has_comm_dtype, sort_dtypes
from ds_hf.errors import ConfigError

__all__ = [
    "LOWER_PRECISION_SAFE_MODULES",
    "PARAM_COMM_DTYPE_ATTR_NAME",
    "autocast_if_enabled",
    "get_all_comm_dtypes",
    "get_autocast_dtype",
    "get_comm_dtype",
    "get_default_autocast_lower_precision_modules",
    "has_comm_dtype",
    "init_autocast_params",
    "is_autocast_initialized",
    "sort_dtypes",
]


def autocast_if_enabled(engine: CoreEngine) -> AbstractContextManager[Any]:
    """The context in which ``engine`` runs its module."""
    return autocast_of(engine.plan, engine.device)


# Classes whose gradients are reduced in the lower dtype by default.
LOWER_PRECISION_SAFE_MODULES: list[type] = sorted(
    find_classes(SAFE_MODULES), key=lambda cls: SAFE_MODULES.index(f"{cls.__module__}.{cls.__name__}")
)


def get_default_autocast_lower_precision_modules() -> list[str]:
    """Their names."""
    return list(SAFE_MODULES)


def init_autocast_params(
    engine: CoreEngine, dtype: torch.dtype, torch_autocast_lower_precision_safe_modules: list[str] | None
) -> None:
    """Agree that ``engine`` reduces the gradients of these classes in ``dtype``: ``initialize`` arranged it.

    Raises:
        ConfigError: it does not; gradients are laid out when an engine is built.
    """
    names = torch_autocast_lower_precision_safe_modules
    classes = find_classes(SAFE_MODULES if names is None else names)
    if get_autocast_dtype(engine) != dtype or classes != find_classes(engine.plan.narrow_modules):
        raise ConfigError(
            f"this engine was not built for autocast to {dtype} with these modules: gradients are laid out by "
            "initialize(); say so in the configuration's torch_autocast (dtype, lower_precision_safe_modules)"
        )


def is_autocast_initialized(engine: CoreEngine) -> bool:
    """Whether ``engine`` runs its module under autocast."""
    return engine.plan.autocast is not None


def get_autocast_dtype(engine: CoreEngine) -> torch.dtype | None:
    """In which dtype; ``None`` when it does not."""
    return None if engine.plan.autocast is None else getattr(torch, engine.plan.autocast)
