"""Hook on ``transformers.generation.utils``: ``generate`` of an engine's model goes through the engine.

It holds the whole weights for the call where they fit (``ds_hf.engine.modules.generation``). Where a forward
communicates, ranks that finish at different lengths wait for each other. transformers does so when it knows of stage 3,
from an ``HfDeepSpeedConfig`` that is alive. Sharded parameters say it themselves, also where a script never made one,
and where there is no engine (``zero.Init``).
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import nn

from ds_hf.engine.modules.generation import generation_of
from ds_hf.engine.zero.buffer import BufferState, buffers_of
from ds_hf.engine.zero.replicas import expert_processes
from ds_hf.hf.autoload import wrap

__all__ = ["wrap_generation"]

_SYNCED_GPUS = 5  # position of the argument, after self


def wrap_generation(module: ModuleType) -> None:
    """Hook of ``transformers.generation.utils``."""
    wrap(module, "GenerationMixin.generate", _through_engine)


def _through_engine(
    wrapped: Callable[..., Any], model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if (generation := generation_of(model)) is not None:
        return generation.around(model, wrapped, args, kwargs)
    # Also where it is False: Whisper's own generate() says so without having been told. Weights that were gathered
    # around the call need nothing, and there may be one rank that generates.
    if len(args) <= _SYNCED_GPUS and not kwargs.get("synced_gpus") and _communicates(model):
        kwargs = {**kwargs, "synced_gpus": True}
    return wrapped(*args, **kwargs)


def _communicates(model: nn.Module) -> bool:
    """Whether a forward of ``model`` gathers anything, or sends tokens to the experts of others."""
    return any(
        buffer.axis.world_size > 1 and buffer.state is BufferState.RELEASED for buffer in buffers_of(model.parameters())
    ) or any(expert_processes(param) > 1 for param in model.parameters())
