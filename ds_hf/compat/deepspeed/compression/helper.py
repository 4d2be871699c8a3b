"""``deepspeed.compression.helper``."""

from ds_hf.compression.conv1d import convert_conv1d_to_linear

from operator import attrgetter as _attrgetter
from typing import Any

__all__ = ["convert_conv1d_to_linear", "recursive_getattr", "recursive_setattr"]


def recursive_getattr(model: Any, module_name: str) -> Any:
    """What ``module_name``, with dots, leads to."""
    return _attrgetter(module_name)(model)


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Put ``module`` at ``module_name``, with dots."""
    parent, _, name = module_name.rpartition(".")
    setattr(_attrgetter(parent)(model) if parent else model, name, module)
