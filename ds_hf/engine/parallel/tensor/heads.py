"""Heads of attention, which are divided whole: what cannot be, and keys and values that several processes need.

Where an attention has fewer of these than processes share it, neighbours compute one together. Each has an even part of
its outputs, as of every layer that is cut by them, so that weights, states and files are no different; the parts are
gathered among the neighbours, and gradients of the whole head summed over them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from torch import nn

from ds_hf.engine.comm.mesh import Axis
from ds_hf.engine.parallel.tensor.functions import Place
from ds_hf.engine.parallel.tensor.rules import POINTER
from ds_hf.engine.parallel.tensor.styles import Style
from ds_hf.errors import Fault

__all__ = ["divide_heads", "layer_of", "share_heads"]

# Of PEFT, whose module around these is the layer.
_ADAPTED = re.compile(r"\.(base_layer|original_module|(modules_to_save|lora_A|lora_B)\.\w+)$")


class _Division(Protocol):
    """What is looked at of a ``plan.Slicing``."""

    name: str
    module: nn.Module
    style: Style
    parts: dict[str, tuple[int, tuple[int, ...]]]
    localises: bool
    neighbours: int
    repeats: int


def layer_of(name: str) -> str:
    """The path of the layer that a module computes, or of which it is an adapter."""
    return _ADAPTED.sub("", name)


def divide_heads(model: nn.Module, divisions: Sequence[_Division], size: int) -> Iterator[Fault]:
    """Say of layers of keys and values how many ``neighbours`` compute a head, and of all layers of such an attention
    for how many queries it ``repeats`` one; yield what would be cut in the middle of a head, once for each kind."""
    modules, said = dict(model.named_modules()), set[str]()
    by_attention: dict[str, list[_Division]] = defaultdict(list)
    for division in divisions:
        if division.style.cuts in ("out", "in") and not division.style.gathers:
            by_attention[layer_of(division.name).rpartition(".")[0]].append(division)
    for name, layers in by_attention.items():
        attention, first = modules.get(name), next((each for each in layers if each.style.cuts == "out"), None)
        if attention is None or first is None or not _is_attention(attention):
            continue
        queries, keys = _heads(attention, model)
        of_keys = _layers_of_keys(attention, layers, queries, keys) if queries and keys else None
        if of_keys is not None and not queries % size and keys < size and not size % keys:
            for division in layers:
                division.repeats = queries // size
                division.neighbours = size // keys if layer_of(division.name) in of_keys else 1
            continue
        for key, heads in (("num_attention_heads", queries), ("num_key_value_heads", keys)):
            if heads and heads % size and key not in said:
                said.add(key)
                message = f"{first.name} computes attention of {heads} heads ({key}), which {size} does not divide"
                fits = _sizes_that_fit(queries or heads, keys or heads, shares=of_keys is not None)
                yield Fault(POINTER, message, f"use a tensor-parallel size of {fits}" if fits else "remove autotp_size")


def share_heads(
    model: nn.Module, divisions: Sequence[_Division], neighbours_of: Callable[[int], Axis], copied: list[Any]
) -> None:
    """Have layers with ``neighbours`` give whole heads, and their attention repeat these for the queries that are here.

    Args:
        neighbours_of: the axis along so many processes that share layers.
        copied: see ``Place``.
    """
    modules = dict(model.named_modules())
    for division in divisions:
        if division.repeats:
            attention: Any = modules[layer_of(division.name).rpartition(".")[0]]
            attention.num_key_value_groups = division.repeats
        if division.neighbours > 1:
            division.module.__dict__["_ds_heads"] = Place(neighbours_of(division.neighbours), division.name, copied)


def _heads(attention: Any, model: nn.Module) -> tuple[int, int]:
    """How many of queries, and of keys, an attention has: layers may differ. 0 where nothing says it."""
    config = getattr(attention, "config", None) or getattr(model, "config", None)
    queries, keys = (_count(config, key) for key in ("num_attention_heads", "num_key_value_heads"))
    groups = _count(attention, "num_key_value_groups")
    if groups <= 1:  # models that repeat heads themselves have 1, too
        return queries, keys
    queries = _count(attention, "num_heads") or queries
    return queries, queries // groups


def _layers_of_keys(attention: Any, layers: Sequence[_Division], queries: int, keys: int) -> set[str] | None:
    """Of the cut layers of an attention those of keys and values; ``None`` where it is none of transformers', which
    counts heads by what these give, or has other layers."""
    width = _count(attention, "head_dim")
    widths = {width, _count(attention, "v_head_dim") or width}
    known = width and _count(attention, "num_key_value_groups") * keys == queries
    if not known or any(each.localises for each in layers):
        return None
    of_queries, of_keys = {queries * width for width in widths}, {keys * width for width in widths}
    gated = {queries, *(2 * each for each in of_queries)}  # a number for each head, or as many beside its query
    found = set[str]()
    for division in layers:
        features = sum(division.parts["weight"][1]) if "weight" in division.parts else 0
        if division.style.cuts == "out" and features in of_keys:
            found.add(layer_of(division.name))
        elif features not in (of_queries | gated if division.style.cuts == "out" else of_queries):
            return None
    return found if len(found) <= 2 else None


def _sizes_that_fit(queries: int, keys: int, *, shares: bool) -> str:
    sizes = [n for n in range(2, queries + 1) if not queries % n and (not keys % n or (shares and not n % keys))]
    return " or ".join(map(str, sizes))


def _count(holder: Any, key: str) -> int:
    try:
        found = getattr(holder, key, None)
    except RuntimeError:  # transformers gives no single number where layers differ
        return 0
    return found if isinstance(found, int) else 0


def _is_attention(module: nn.Module) -> bool:
    return "attention" in type(module).__name__.lower() or hasattr(module, "head_dim")
