"""Which weights a configuration has quantized: ``weight_quantization`` (ZeRO-Inference, frozen weights by name) and
``zero_quantized_nontrainable_weights`` (8 bits of all that is frozen)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ds_hf.config.types import Config
from ds_hf.engine.modules.quantized.format import WeightFormat, format_of
from ds_hf.engine.modules.quantized.layers import Choose, has_stacks, is_quantized, quantize_layers
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
        trains: an optimizer is configured or given: of what is named only what is frozen is quantized.
        dtype: in which the model computes, ``None`` for the weights' own.

    Raises:
        ConfigError: options without a matching format, nothing but what trains, or weights that are quantized already.
    """
    section = settings.weight_quantization
    named = choice_of(section.quantized_initialization, section.post_init_quant) if section.enabled else None
    rest = settings.zero_optimization.zero_quantized_nontrainable_weights
    if named is None and not rest:
        return
    if named is not None and not trains:
        twice = next((name for name, param in model.named_parameters() if is_packed(param)), None)
        if twice is not None:
            raise ConfigError(
                f"{twice} is quantized already: remove weight_quantization, or load whole weights", _POINTER
            )

    def choose(name: str, module: nn.Module) -> WeightFormat | None:
        form = None if named is None else named(name, module)
        return _FROZEN if form is None and rest else form

    if named is not None and trains and all(param.requires_grad or is_packed(param) for param in model.parameters()):
        raise ConfigError(
            "quantized weights do not train, and there is an optimizer, which trains all of them: remove "
            "weight_quantization, or freeze the weights and train adapters on them",
            _POINTER,
        )
    target = None if dtype is None else getattr(torch, dtype)
    done = []
    if has_stacks(model):
        from ds_hf.engine.modules.quantized.stacks import quantize_experts

        chosen = _of_experts(choose, named) if trains or named is None else choose
        done += quantize_experts(model, chosen, settings.expert_parallel, target, trains=trains)
    done += quantize_layers(model, choose, target, frozen_only=trains or named is None)
    if not done and trains and named is not None and not any(map(is_quantized, model.modules())):
        asked = ", ".join(section.post_init_quant) or "quantized_initialization"
        raise ConfigError(
            f"nothing that is frozen is to rest in few bits: no linear layer, embedding or stacked experts fit {asked}",
            _POINTER,
        )
    if not done:
        what = "zero_quantized_nontrainable_weights" if named is None else "weight_quantization"
        log_once(f"{what}: no linear layer, embedding or stacked experts of the model fit it, so nothing is quantized")


_FROZEN = WeightFormat(8, 256)


def _of_experts(choose: Choose, named: Choose | None) -> Choose:
    """Of stacked weights: those that train are passed over, unless ``named`` asks for them."""

    def choose_stack(name: str, module: nn.Module) -> WeightFormat | None:
        param = module._parameters[name.rpartition(".")[2]]
        passed = param is not None and param.requires_grad and (named is None or named(name, module) is None)
        return None if passed else choose(name, module)

    return choose_stack
