"""``deepspeed.runtime.data_pipeline.data_routing.helper``: the engine drops tokens without wrappers around layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ds_hf.deepspeed_api.engine import Engine

__all__ = ["convert_to_random_ltd", "remove_random_ltd_state_dict", "save_without_random_ltd"]

_WRAPPED = ".random_ltd_layer"


def convert_to_random_ltd(model: Engine, convert_type: type) -> Engine:
    """Say which class the blocks of an engine's model have; the same engine.

    Raises:
        ConfigError: its configuration drops no tokens, or names blocks that are not there.
        TypeError: it is no engine.
    """
    if not isinstance(model, Engine):
        raise TypeError(f"convert_to_random_ltd() takes what initialize() returned, not a {type(model).__name__}")
    model.random_ltd_initialize(convert_type)
    return model


def save_without_random_ltd(model: Engine | nn.Module) -> dict[str, Any]:
    """The state dict of a model, under the names that it has without wrappers."""
    module = model.module if isinstance(model, Engine) else model
    return remove_random_ltd_state_dict(module.state_dict())


def remove_random_ltd_state_dict(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The same values, under names without wrappers."""
    return {name.replace(_WRAPPED, ""): value for name, value in state_dict.items()}
