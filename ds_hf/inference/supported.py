"""What decoding with a static cache can do, and why it cannot do the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ds_hf.engine.zero.buffer import BufferState, buffers_of
from ds_hf.inference.static import CACHE_NAMES, caches_of

__all__ = [
    "Unsupported",
    "base_model",
    "check_cache",
    "check_choice",
    "check_mode",
    "refusal",
    "stops",
    "unsupported_model",
]

_ELSEWHERE = ("streamer", "assistant_model", "prefix_allowed_tokens_fn", "custom_generate", "negative_prompt_ids")
_CACHES = ("cache_implementation", "prefill_chunk_size")
# Of transformers' processors those that look at nothing but the logits.
_PROCESSORS = {
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "MinPLogitsWarper",
    "TypicalLogitsWarper",
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
    "SuppressTokensLogitsProcessor",
}


class Unsupported(Exception):
    """Decoding with a static cache cannot do this; the text says why."""


def refusal(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Why ``model.generate(*args, **kwargs)`` cannot be ours, as far as it shows before transformers prepares it."""
    why = unsupported_model(base_model(model))
    if why is not None:
        return why
    if len(args) > 2:
        return "arguments are given by position"
    given = next((name for name in (*_ELSEWHERE, *CACHE_NAMES, *_CACHES) if kwargs.get(name) is not None), None)
    if given is not None:
        return f"{given} is given"
    if kwargs.get("synced_gpus"):
        return "processes wait for each other (synced_gpus)"
    if any(buffer.state is BufferState.RELEASED for buffer in buffers_of(model.parameters())):
        return "the weights come block by block"
    return None


def base_model(model: Any) -> Any:
    """The model of transformers inside a PEFT model, or ``model``."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def unsupported_model(model: Any) -> str | None:
    """Why ``model`` has no static cache, if it has none."""
    from transformers import GenerationMixin

    kind: Any = type(model)
    if not issubclass(kind, GenerationMixin):
        return f"{kind.__name__} is no model of transformers that generates"
    before = kind.__mro__[: kind.__mro__.index(GenerationMixin)]
    if any("generate" in base.__dict__ for base in before):
        return f"{kind.__name__} has a generate of its own"
    if not getattr(model, "_can_compile_fullgraph", False) or getattr(model, "_is_stateful", False):
        return f"{kind.__name__} has no static cache in transformers"
    attention = getattr(model.config, "_attn_implementation", None)
    if attention not in ("sdpa", "eager"):
        return f"attention is {attention}, and a static cache needs sdpa or eager"
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        return "the model lies on several devices"
    return None


def check_mode(config: Any) -> None:
    """Raises:
    Unsupported: ``config`` asks for more than greedy decoding or sampling.
    """
    from transformers.generation.configuration_utils import GenerationMode

    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise Unsupported(f"num_beams is {config.num_beams}" if config.num_beams > 1 else f"the mode is {mode.value}")
    if config.return_dict_in_generate:
        raise Unsupported("return_dict_in_generate asks for what every step computed")
    if config.use_cache is False:
        raise Unsupported("use_cache is false")
    for name in _CACHES:
        value = getattr(config, name, None)
        if value is not None:
            raise Unsupported(f"{name} is {value!r}")


def stops(criteria: Any) -> tuple[int, Tensor | None]:
    """Total length and the tokens that end a sequence."""
    from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

    other = next((type(c).__name__ for c in criteria if type(c) not in (EosTokenCriteria, MaxLengthCriteria)), None)
    limits = [c.max_length for c in criteria if type(c) is MaxLengthCriteria]
    if other is not None or not limits:
        raise Unsupported(f"it stops by {other}" if other else "no length ends it")
    ends = [c.eos_token_id.flatten() for c in criteria if type(c) is EosTokenCriteria]
    return min(limits), torch.cat(ends) if ends else None


def check_choice(processors: Any) -> None:
    """Raises:
    Unsupported: one of the ``processors`` looks at more than logits.
    """
    other = next((type(p).__name__ for p in processors if type(p).__name__ not in _PROCESSORS), None)
    if other is not None:
        raise Unsupported(f"{other} looks at the tokens so far")


def check_cache(cache: Any) -> None:
    """Raises:
    Unsupported: ``cache`` is none whose keys and values can be copied into a static one.
    """
    from transformers import cache_utils

    copied = (cache_utils.DynamicLayer, cache_utils.DynamicSlidingWindowLayer)
    for part in caches_of(cache):
        if type(part) is not cache_utils.DynamicCache or getattr(part, "offloading", False):
            raise Unsupported(f"its cache is a {type(part).__name__}")
        other = next((type(layer).__name__ for layer in part.layers if type(layer) not in copied), None)
        if other is not None:
            raise Unsupported(f"its cache has layers of {other}")
