"""What a call of ``generate`` takes on the device beside the weights, from the model's configuration.

An estimate that decides whether the weights are gathered as well, and which nothing else depends on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ds_hf.errors import DsHfError
from ds_hf.log import log_once

__all__ = ["cache_nbytes", "call_nbytes", "check_cache_place", "positions_of", "prompt_shape"]

_STATIC_IN_HOST = ("offloaded_static", "offloaded_hybrid", "offloaded_hybrid_chunked")
_PROMPTS = ("inputs", "input_ids", "inputs_embeds", "input_features", "pixel_values")
_TOKENS = 20  # what ``generate`` adds where nothing says how much


def prompt_shape(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
    """``(rows, positions)`` of the prompts of a call; ``(1, 1)`` for one without."""
    given = [*args[:1], *(kwargs.get(name) for name in _PROMPTS)]
    for value in given:
        if isinstance(value, Tensor) and value.dim() >= 2:
            positions = value.shape[1] if value.dim() <= 3 else 1
            return int(value.shape[0]), int(positions)
    return 1, 1


def positions_of(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Prompt and new tokens at most of a call."""
    prompt = prompt_shape(args, kwargs)[1]
    new = _setting(model, kwargs, "max_new_tokens")
    if new is not None:
        return prompt + int(new)
    longest = _setting(model, kwargs, "max_length")
    return max(int(longest), prompt + 1) if longest is not None else prompt + _TOKENS


def check_cache_place(model: nn.Module, kwargs: dict[str, Any], device: torch.device) -> None:
    """See to a cache that leaves the GPU: in torch 2.11 the step that transformers compiles for a static one ends in
    a segmentation fault, so there ``kwargs`` have it compile nothing.

    Raises:
        DsHfError: the model computes on the CPU.
    """
    cache = _setting(model, kwargs, "cache_implementation")
    if device.type == "cpu" and isinstance(cache, str) and cache.startswith("offloaded"):
        raise DsHfError(
            f"cache_implementation is {cache!r}, which moves a GPU's cache to host memory, and the model is on the "
            "CPU: remove it"
        )
    crashes = cache in _STATIC_IN_HOST and torch.__version__ < "2.12"
    if crashes and not _setting(model, kwargs, "disable_compile"):
        log_once(f"generation with the cache {cache!r} is not compiled: torch before 2.12 ends in a segmentation fault")
        kwargs["disable_compile"] = True


def call_nbytes(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> int:
    """Cache, activations of the prompt and logits, in bytes."""
    config = _text_config(model)
    rows, prompt = prompt_shape(args, kwargs)
    rows *= max(int(_setting(model, kwargs, name) or 1) for name in ("num_beams", "num_return_sequences"))
    hidden = _first(config, "hidden_size", "d_model")
    inner = _first(config, "intermediate_size") or 4 * hidden
    activations = rows * prompt * (8 * hidden + 3 * inner) * dtype.itemsize
    logits = 3 * 4 * rows * int(getattr(config, "vocab_size", 0) or 0)
    return cache_nbytes(config, rows, positions_of(model, args, kwargs), dtype) + activations + logits


def cache_nbytes(config: Any, rows: int, positions: int, dtype: torch.dtype) -> int:
    """Keys and values of ``positions`` tokens of ``rows`` sequences in every layer, in bytes; 0 where the
    configuration does not say its sizes."""
    layers = _first(config, "num_hidden_layers", "n_layer", "num_layers", "decoder_layers")
    heads = _first(config, "num_attention_heads", "n_head", "num_heads", "decoder_attention_heads")
    if not layers or not heads:
        return 0
    hidden = _first(config, "hidden_size", "n_embd", "d_model")
    width = _first(config, "head_dim", "d_kv") or hidden // heads
    key_heads = _first(config, "num_key_value_heads") or heads
    return 2 * layers * rows * positions * key_heads * width * dtype.itemsize


def _first(config: Any, *names: str) -> int:
    """The first of some numbers that the configuration has: the largest where it has one for each layer."""
    for name in names:
        try:
            value = getattr(config, name, None)
        except RuntimeError:  # transformers gives no single number where layers differ: Gemma 4
            value = [getattr(layer, name, None) for layer in config.per_layer_config]
        if isinstance(value, list | tuple):
            value = max((each for each in value if isinstance(each, int)), default=0)
        if isinstance(value, int) and value > 0:
            return value
    return 0


def _text_config(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    take = getattr(config, "get_text_config", None)
    return take() if callable(take) else config


def _setting(model: nn.Module, kwargs: dict[str, Any], name: str) -> Any:
    """A generation setting: of the call, of its ``generation_config``, or of the model's."""
    for source in (kwargs.get("generation_config"), getattr(model, "generation_config", None)):
        if kwargs.get(name) is None and getattr(source, name, None) is not None:
            return getattr(source, name)
    return kwargs.get(name)
