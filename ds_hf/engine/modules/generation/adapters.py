"""LoRA adapters of PEFT, merged into the weights below them for a call.

PEFT's own ``unmerge`` subtracts what was added, which is not what was there before. Here the values are kept and put
back, to the bit; in memory that ZeRO gives back anyway, nothing is kept. Layers are known by what they can do
(``merge``, ``get_base_layer``), so peft need not be there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ds_hf.engine.modules.generation.weights import backup_device
from ds_hf.engine.zero.buffer import home_of
from ds_hf.log import warn_once

__all__ = ["has_adapters", "merged"]


def has_adapters(model: nn.Module) -> bool:
    """Whether there are LoRA layers that are switched on."""
    return any(True for _ in _layers(model))


@contextmanager
def merged(model: nn.Module) -> Iterator[bool]:
    """LoRA is a part of the weights inside, and afterwards everything is as before. Weights must be whole.

    Yields:
        whether anything was merged: where a layer cannot be (quantized, tied), none is, and adapters are computed
        beside their layers as in training.
    """
    layers = list(_layers(model))
    if not layers or not _can_merge(model, layers):
        yield False
        return
    kept = _Kept([p for layer in layers for p in layer.get_base_layer().parameters(recurse=False)])
    try:
        with torch.no_grad():
            problem = _merge(layers)
            kept.in_place()
            if problem is not None:
                warn_once(f"generation: LoRA stays beside its layers, which PEFT cannot merge: {problem}")
                _restore(layers, kept)
                layers = []
        yield bool(layers)
    finally:
        _restore(layers, kept)


def _layers(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        layer: Any = module
        known = all(hasattr(layer, name) for name in ("lora_A", "merge", "get_base_layer", "merged_adapters"))
        if known and not layer.disable_adapters and not layer.merged_adapters and layer.active_adapters:
            yield layer


def _can_merge(model: nn.Module, layers: list[Any]) -> bool:
    """Weights are plain numbers, and used by the adapter's layer alone."""
    uses = Counter(id(param) for _, param in model.named_parameters(remove_duplicate=False))
    for layer in layers:
        for name, param in layer.get_base_layer().named_parameters(recurse=False):
            if type(param) is not nn.Parameter or not param.is_floating_point() or param.element_size() < 2:
                return False
            if name == "weight" and uses[id(param)] > 1:
                return False
    return True


def _merge(layers: list[Any]) -> Exception | None:
    for layer in layers:
        try:
            layer.merge(safe_merge=False)
        except (RuntimeError, ValueError, NotImplementedError, KeyError) as error:
            return error
    return None


def _restore(layers: list[Any], kept: _Kept) -> None:
    for layer in layers:
        layer.merged_adapters.clear()
    kept.put_back()


class _Kept:
    """Values of parameters, and where they lie."""

    def __init__(self, params: list[Any]) -> None:
        found = {id(param): param for param in params}
        self._places = [(param, param.data) for param in found.values()]
        nbytes = sum(place.nbytes for _, place in self._places)
        self._copies: list[tuple[Tensor, Tensor]] = []
        for param, place in self._places:
            home = home_of(param)
            if home is None or not home.buffer.on_loan:
                self._copies.append((place, place.to(backup_device(nbytes, place.device), copy=True)))

    def in_place(self) -> None:
        """Values that were put elsewhere (DoRA's) come to where the engine, and captured graphs, look for them."""
        for param, place in self._places:
            if param.data_ptr() != place.data_ptr():
                place.copy_(param.data)
                param.data = place

    @torch.no_grad()
    def put_back(self) -> None:
        self.in_place()
        for place, copy in self._copies:
            place.copy_(copy)
        self._places, self._copies = [], []
