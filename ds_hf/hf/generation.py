"""Hook on ``transformers.generation.utils``: ranks that finish at different lengths wait for each other.

transformers does so when it knows of stage 3, from an ``HfDeepSpeedConfig`` that is alive. Sharded parameters say it
themselves, also where a script never made one.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt
from torch import nn

from ds_hf.engine.zero.buffer import buffers_of

__all__ = ["wrap_generation"]


def wrap_generation(module: ModuleType) -> None:
    """Hook of ``transformers.generation.utils``."""
    wrapt.wrap_function_wrapper(module, "GenerationMixin.generate", _in_step)


def _in_step(wrapped: Callable[..., Any], model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    position = 5  # of synced_gpus
    given = args[position] if len(args) > position else kwargs.get("synced_gpus")
    if given is None and len(args) <= position:
        buffers = buffers_of(model.parameters())
        if buffers and buffers[0].axis.world_size > 1:
            kwargs = {**kwargs, "synced_gpus": True}
    return wrapped(*args, **kwargs)
