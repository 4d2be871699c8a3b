"""Hook on ``transformers.modeling_utils``: initialising weights of a model whose loaded parameters are sharded.

After loading, transformers runs every module's ``_init_weights`` and relies on its ``init`` functions to pass over what
was loaded. Several models look at the shape of a loaded parameter first (Whisper's sinusoids, ResNet's fan-in), which
at stage 3 is that of a placeholder. All ranks run the same code on the same placeholders, so all fail at the same
module: there the parameters are gathered and the module is tried again. Everything else is gathered never.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt
from torch import nn

from ds_hf.engine.zero.buffer import home_of
from ds_hf.engine.zero.gather import GatheredParameters

__all__ = ["wrap_modeling"]


def wrap_modeling(module: ModuleType) -> None:
    """Hook of ``transformers.modeling_utils``."""
    wrapt.wrap_function_wrapper(module, "PreTrainedModel.initialize_weights", _gather_where_needed)


def _gather_where_needed(
    wrapped: Callable[..., Any], model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if not any(_is_sharded(param) for param in model.parameters()):
        return wrapped(*args, **kwargs)
    models = [m for m in model.modules() if hasattr(m, "_initialize_weights")]  # composite models: each has its own
    for each in models:
        each.__dict__["_initialize_weights"] = _retrying(each._initialize_weights)
    try:
        return wrapped(*args, **kwargs)
    finally:
        for each in models:
            each.__dict__.pop("_initialize_weights", None)


def _retrying(initialize: Any) -> Callable[..., Any]:
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            return initialize(module, *args, **kwargs)
        except Exception:
            params = [p for owner in (module, *module.children()) for p in owner.parameters(recurse=False)]
            if not any(_is_sharded(param) for param in params):
                raise
            with GatheredParameters(params, modifier_rank=0):
                return initialize(module, *args, **kwargs)

    return call


def _is_sharded(param: nn.Parameter) -> bool:
    home = home_of(param)
    return home is not None and home.buffer.sharded
