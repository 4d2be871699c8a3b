"""``init_inference``, as DeepSpeed has it."""

from __future__ import annotations

from typing import Any

from torch import nn

from ds_hf.inference.config import InferenceConfig, load_inference_config
from ds_hf.inference.engine import InferenceEngine

__all__ = ["DeepSpeedInferenceConfig", "default_inference_config", "init_inference"]

DeepSpeedInferenceConfig = InferenceConfig


def init_inference(model: nn.Module, config: Any = None, **kwargs: Any) -> InferenceEngine:
    """Prepare ``model`` for inference (DeepSpeed's ``init_inference``).

    Args:
        model: a model of transformers, or any module; changed in place.
        config: path, JSON text or dict of DeepSpeed's inference configuration.
        kwargs: the same keys.

    Returns:
        an ``InferenceEngine``: ``forward``, ``generate``, ``model_times``, ``destroy``; other names are the model's.

    Raises:
        ConfigError: a key or value is wrong, ``config`` and ``kwargs`` differ, or the model cannot be prepared so.
        CheckpointError: the checkpoint cannot be read or does not fit.
    """
    return InferenceEngine(model, load_inference_config(config, kwargs))


def default_inference_config() -> dict[str, Any]:
    """The defaults of the inference configuration."""
    return InferenceConfig().dict()
