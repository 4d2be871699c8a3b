"""Hook on ``transformers.modeling_utils``: initialising weights of a model whose loaded parameters are sharded.

After loading, transformers runs every module's ``_init_weights`` and relies on its ``init`` functions to pass over what
was loaded. Several models look at the shape of a loaded parameter first (Whisper's and DistilBert's sinusoids, ResNet's
fan-in), which at stage 3 would be that of a placeholder. So each module's parameters, and its children's, are gathered
while it runs, as transformers itself does for models that are not loaded. Memory: one module.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt
from torch import nn

from ds_hf.engine.zero.buffer import buffers_of
from ds_hf.engine.zero.gather import GatheredParameters

__all__ = ["wrap_modeling"]


def wrap_modeling(module: ModuleType) -> None:
    """Hook of ``transformers.modeling_utils``."""
    wrapt.wrap_function_wrapper(module, "PreTrainedModel.initialize_weights", _gathered)


def _gathered(wrapped: Callable[..., Any], model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not buffers_of(model.parameters()):
        return wrapped(*args, **kwargs)
    models = [m for m in model.modules() if hasattr(m, "_initialize_weights")]  # in a composite model each has its own
    for each in models:
        each.__dict__["_initialize_weights"] = _gathering(each._initialize_weights)
    try:
        return wrapped(*args, **kwargs)
    finally:
        for each in models:
            del each.__dict__["_initialize_weights"]


def _gathering(initialize: Any) -> Callable[..., Any]:
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        params = [p for owner in (module, *module.children()) for p in owner.parameters(recurse=False)]
        with GatheredParameters(params):
            return initialize(module, *args, **kwargs)

    return call
