"""Which weights a configuration has quantized: ``weight_quantization`` (ZeRO-Inference) and
``zero_quantized_nontrainable_weights``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ds_hf.config.types import Config
from ds_hf.engine.modules.quantized.format import WeightFormat, format_of
from ds_hf.engine.modules.quantized.layers import Choose, quantize_layers
from ds_hf.engine.zero.packed import is_packed
from ds_hf.errors import ConfigError
from ds_hf.log import log_once

__all__ = ["choice_of", "quantize_by_settings"]

_POINTER = "/weight_quantization"


def choice_of(initial: Any, later: Any, pointer: str = _POINTER) -> Choose | None:
    """By ``quantized_initialization`` and ``post_init_quant``, which names parts of layers' names; ``None``: nothing.

    Raises:
        ConfigError: options without a matching format.
    """
    everywhere = format_of(initial, f"{pointer}/quantized_initialization") if initial else None
    named = {key: format_of(value, f"{pointer}/post_init_quant/{key}") for key, value in (later or {}).items()}
    if everywhere is None and not named:
        return None

    def choose(name: str, module: nn.Module) -> WeightFormat | None:
        return next((form for key, form in named.items() if key in name), everywhere)

    return choose


def quantize_by_settings(settings: Config, model: nn.Module, *, trains: bool, dtype: str | None) -> None:
    """Quantize what ``settings`` say, before the model is laid out. Collective where parameters are divided.

    Args:
        trains: an optimizer is configured or given.
        dtype: in which the model computes, ``None`` for the weights' own.

    Raises:
        ConfigError: options without a matching format, a model that trains, or weights that are quantized already.
    """
    section = settings.weight_quantization
    choose = None
    if section.enabled:
        choose = choice_of(section.quantized_initialization, section.post_init_quant)
    if choose is not None:
        twice = next((name for name, param in model.named_parameters() if is_packed(param)), None)
        if twice is not None:
            raise ConfigError(
                f"{twice} is quantized already: remove weight_quantization, or load whole weights", _POINTER
            )
        if trains:
            raise ConfigError(
                "quantized weights do not train, and there is an optimizer: remove weight_quantization, or freeze the "
                "weights, train adapters on them and set zero_optimization.zero_quantized_nontrainable_weights",
                _POINTER,
            )
    elif settings.zero_optimization.zero_quantized_nontrainable_weights:
        choose = _frozen
    if choose is None:
        return
    done = quantize_layers(model, choose, None if dtype is None else getattr(torch, dtype))
    if not done:
        what = "weight_quantization" if choose is not _frozen else "zero_quantized_nontrainable_weights"
        log_once(f"{what}: the model has no layer to quantize")


def _frozen(name: str, module: nn.Module) -> WeightFormat | None:
    weight = module._parameters["weight"]
    return None if weight is None or weight.requires_grad else WeightFormat(8, 256)
