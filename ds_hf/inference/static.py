"""Static caches of transformers, filled from the dynamic one that a prompt was computed with.

The prompt is computed as transformers always does it, so with the same kernels and numbers. Layers with a sliding
window are kept at full length: the model's mask has the window, and nothing has to be rolled.

Where no graph is captured, layers give out only the positions that are filled: attention then sees the same shapes as
with a dynamic cache, and its results are the same to the bit.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ds_hf.inference.step import lengths_of

__all__ = ["CACHE_NAMES", "cache_argument", "cache_of", "caches_of", "fill", "given_cache", "shape_of", "static_cache"]

# What transformers' models call the cache they take and give back: the first since 5.24, the second before.
CACHE_NAMES = ("cache", "past_key_values")


def static_cache(dynamic: Any, length: int, *, filled_only: bool) -> Any:
    """A static cache for what ``dynamic`` has, empty, with room for ``length`` positions.

    Args:
        filled_only: give attention the positions that are filled, for steps that are not captured.
    """
    from transformers.cache_utils import Cache, EncoderDecoderCache, StaticLayer

    kind = _filled_layer() if filled_only else StaticLayer

    def of(part: Any, size: int | None) -> Any:
        layers: list[Any] = []
        for layer in part.layers:
            static = (StaticLayer if size is None else kind)(max_cache_len=size or layer.keys.shape[2])
            static.lazy_initialization(layer.keys, layer.values)
            layers.append(static)
        return Cache(layers=layers)

    own, *cross = caches_of(dynamic)
    if not cross:
        return of(own, length)
    cache = EncoderDecoderCache(of(own, length), of(cross[0], None))
    cache.is_updated = dict.fromkeys(range(len(cross[0].layers)), True)
    return cache


@functools.cache
def _filled_layer() -> Any:
    from transformers.cache_utils import StaticLayer

    class FilledLayer(StaticLayer):  # type: ignore[no-untyped-call]
        """Keys and values in memory that stays, of which ``cumulative_length`` positions are filled."""

        keys: Tensor
        values: Tensor

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            begin = int(self.cumulative_length)
            end = begin + key_states.shape[-2]
            self.keys[:, :, begin:end] = key_states
            self.values[:, :, begin:end] = value_states
            self.cumulative_length.fill_(end)
            return self.keys[:, :, :end], self.values[:, :, :end]

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            return int(self.cumulative_length) + query_length, 0

        def get_seq_length(self) -> int:
            return int(self.cumulative_length)

    return FilledLayer


def fill(static: Any, dynamic: Any) -> int:
    """Copy the prompt's keys and values; how many positions there are."""
    filled = int(dynamic.get_seq_length())
    for part, (mine, other) in enumerate(zip(caches_of(static), caches_of(dynamic), strict=True)):
        for to, layer in zip(mine.layers, other.layers, strict=True):
            end = filled if part == 0 else layer.keys.shape[2]
            begin = end - layer.keys.shape[2]  # of a window only the last positions are there
            to.keys[:, :, begin:end] = layer.keys
            to.values[:, :, begin:end] = layer.values
            layer.keys = layer.values = torch.empty(0)  # the copy is all that is needed
    for length in lengths_of(static):
        length.fill_(filled)
    return filled


def shape_of(cache: Any) -> tuple[Any, ...]:
    """What a static cache for ``cache`` depends on: shapes without the prompt's length, dtypes, devices."""
    own, *cross = caches_of(cache)
    return tuple(_heads(layer.keys) for layer in own.layers) + tuple(
        (layer.keys.shape, layer.keys.dtype) for part in cross for layer in part.layers
    )


def _heads(keys: Tensor) -> tuple[Any, ...]:
    return keys.shape[0], keys.shape[1], keys.shape[3], keys.dtype, keys.device


def given_cache(given: Mapping[str, Any]) -> tuple[str, Any]:
    """The cache among arguments or outputs of a model, after its name there; of none the older name and ``None``."""
    return next(((name, given[name]) for name in CACHE_NAMES if given.get(name) is not None), (CACHE_NAMES[-1], None))


def cache_argument(model: nn.Module) -> str:
    """What the call of ``model`` names its cache."""
    takes = inspect.signature(type(model).forward).parameters
    return next((name for name in CACHE_NAMES if name in takes), CACHE_NAMES[-1])


def cache_of(outputs: Any) -> Any:
    """The cache that a model gives back."""
    name = next((name for name in CACHE_NAMES if hasattr(outputs, name)), CACHE_NAMES[-1])
    return getattr(outputs, name)


def caches_of(cache: Any) -> list[Any]:
    """The cache of the decoder, and that of what it attends to in an encoder if there is one."""
    own = getattr(cache, "self_attention_cache", None)
    return [cache] if own is None else [own, cache.cross_attention_cache]
