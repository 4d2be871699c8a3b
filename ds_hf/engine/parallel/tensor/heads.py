"""Heads of attention, which are divided whole: what cannot be, and keys and values that several processes need.

Where a model has fewer of these than processes share a layer, neighbours compute one together. Each has an even part of
its outputs, as of every layer that is cut by them, so that weights, states and files are no different; the parts are
gathered among the neighbours, and gradients of the whole head summed over them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from ds_hf.engine.comm.mesh import Axis
from ds_hf.engine.parallel.tensor.functions import Place, gather_heads
from ds_hf.engine.parallel.tensor.rules import POINTER
from ds_hf.engine.parallel.tensor.styles import Style
from ds_hf.errors import Fault

__all__ = ["divide_heads", "share_heads"]

_ADAPTED = re.compile(r"\.(base_layer|original_module|modules_to_save\.\w+)$")  # of PEFT, whose module is the layer


class _Division(Protocol):
    """What is looked at of a ``plan.Slicing``."""

    name: str
    module: nn.Module
    style: Style
    parts: dict[str, tuple[int, tuple[int, ...]]]
    localises: bool
    neighbours: int


def divide_heads(model: nn.Module, divisions: Sequence[_Division], size: int) -> Iterator[Fault]:
    """Say of layers of keys and values how many ``neighbours`` compute a head; yield what would be cut in the middle of
    a head, once for each kind."""
    modules, said = dict(model.named_modules()), set[str]()
    for division in divisions:
        attention = modules.get(_layer(division.name).rpartition(".")[0])
        if attention is None or division.style.cuts != "out" or division.style.gathers or not _is_attention(attention):
            continue
        config = getattr(attention, "config", None) or getattr(model, "config", None)
        queries, keys = (_count(config, key) for key in ("num_attention_heads", "num_key_value_heads"))
        if queries and keys and not queries % size and keys < size and not size % keys:
            width = getattr(attention, "head_dim", None)
            outputs = sum(division.parts["weight"][1]) if "weight" in division.parts else 0
            knows_groups = isinstance(getattr(attention, "num_key_value_groups", None), int)
            if (
                knows_groups
                and not division.localises
                and isinstance(width, int)
                and outputs in (queries * width, keys * width)
            ):
                division.neighbours = size // keys if outputs == keys * width else 1
                continue
        for key, heads in (("num_attention_heads", queries), ("num_key_value_heads", keys)):
            if heads and heads % size and key not in said:
                said.add(key)
                message = f"{division.name} computes attention of {heads} heads ({key}), which {size} does not divide"
                most = math.gcd(queries or heads, keys or heads)
                fits = [n for n in range(2, most + 1) if most % n == 0]
                choice = (
                    f"use a tensor-parallel size of {' or '.join(map(str, fits))}" if fits else "remove autotp_size"
                )
                yield Fault(POINTER, message, choice)


def share_heads(
    model: nn.Module, divisions: Sequence[_Division], neighbours_of: Callable[[int], Axis], copied: list[Any]
) -> None:
    """Have layers with ``neighbours`` give whole heads, and their attention repeat these for the queries that are here.

    Args:
        neighbours_of: the axis along so many processes that share layers.
        copied: see ``Place``.
    """
    modules, done = dict(model.named_modules()), set[nn.Module]()
    for division in divisions:
        layer = modules[_layer(division.name)]
        if division.neighbours == 1 or layer in done:
            continue
        attention: Any = modules[_layer(division.name).rpartition(".")[0]]
        if attention not in done:
            attention.num_key_value_groups //= division.neighbours
        done |= {layer, attention}
        layer.register_forward_hook(_Gather(Place(neighbours_of(division.neighbours), division.name, copied)))


class _Gather:
    """A hook that stays with copies of its module, as the other processes do."""

    def __init__(self, place: Place) -> None:
        self.place = place

    def __call__(self, module: nn.Module, args: Any, part: Tensor) -> Tensor:
        return gather_heads(part, self.place)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Gather:
        return self


def _layer(name: str) -> str:
    return _ADAPTED.sub("", name)


def _count(config: Any, key: str) -> int:
    try:
        found = getattr(config, key, None)
    except RuntimeError:  # transformers gives no single number where layers differ
        return 0
    return found if isinstance(found, int) else 0


def _is_attention(module: nn.Module) -> bool:
    return "attention" in type(module).__name__.lower() or hasattr(module, "head_dim")
