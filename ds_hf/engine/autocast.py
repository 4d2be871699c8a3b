"""``torch.autocast`` around the engine's forward, as the state plan says.

Invariant: inside ``engine(...)`` autocast is what the configuration asks for, whatever the caller opened around it, so
that the gradients have the range and the dtype that the reductions expect. Recomputations under activation
checkpointing take it over from the forward that they repeat: torch's checkpoints do that.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from ds_hf.config.plan import SAFE_MODULES
from ds_hf.engine.zero.comm_dtype import find_classes
from ds_hf.errors import ConfigError
from ds_hf.log import log_once, warn_once

if TYPE_CHECKING:
    from ds_hf.engine.engine import Engine

__all__ = [
    "autocast_if_enabled",
    "get_autocast_dtype",
    "get_default_autocast_lower_precision_modules",
    "init_autocast_params",
    "is_autocast_initialized",
    "lower_precision_safe_modules",
]


def autocast_if_enabled(engine: Engine) -> AbstractContextManager[Any]:
    """The context in which ``engine`` runs its module.

    Where parameters are sharded nothing is cached: a weight's 16-bit copy would stay until forward ends, of all units
    at once.
    """
    kind, name = engine.device.type, engine.plan.autocast
    inside = torch.is_autocast_enabled(kind)
    if name is None:
        if not inside:
            return nullcontext()
        warn_once(
            "torch.autocast is active around a call of the engine, and is switched off inside: the configuration has "
            'no torch_autocast. Its fp16 and bf16 blocks decide alone; for autocast add "torch_autocast": '
            '{"enabled": true, "dtype": "bf16"}'
        )
        return torch.autocast(kind, enabled=False)
    if inside:
        log_once("torch.autocast around a call of the engine gives way to the configuration's torch_autocast")
        torch.clear_autocast_cache()  # it may hold casts of weights from before the last step
    return torch.autocast(kind, dtype=getattr(torch, name), cache_enabled=not engine.plan.shards_parameters)


# -- under DeepSpeed's names ------------------------------------------------------------------------------------------


def lower_precision_safe_modules() -> list[type]:
    """Classes whose gradients are reduced in the lower dtype by default."""
    return sorted(find_classes(SAFE_MODULES), key=lambda cls: SAFE_MODULES.index(f"{cls.__module__}.{cls.__name__}"))


def get_default_autocast_lower_precision_modules() -> list[str]:
    """Their names."""
    return list(SAFE_MODULES)


def init_autocast_params(
    engine: Engine, dtype: torch.dtype, torch_autocast_lower_precision_safe_modules: list[str] | None
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


def is_autocast_initialized(engine: Engine) -> bool:
    """Whether ``engine`` runs its module under autocast."""
    return engine.plan.autocast is not None


def get_autocast_dtype(engine: Engine) -> torch.dtype | None:
    """In which dtype; ``None`` when it does not."""
    return None if engine.plan.autocast is None else getattr(torch, engine.plan.autocast)
