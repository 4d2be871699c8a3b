"""The experts of a block: ``DispatchedExperts``, the class that a divided module gets, and ``LocalExperts``, that of
one whose experts are all here.

The module stays the model's own, with its name, its parameters (a part of them) and its hooks; what it computes for the
tokens that reach it are its own products, activations, clamps, biases and norms (``compute.py``), or its own
``forward``, which knows of fewer experts.

A pass: rows to the processes that have the experts of their tokens, routes sorted by expert, the module's forward, the
sum of each row, rows back, the sum of each token. Every process takes part, also with no token: it runs a row of zeros
with weight 0, so that backward has the same collectives on all and its parameters have a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ds_hf.engine.ops.routes import BITS, Groups, group, group_by_process
from ds_hf.engine.parallel.experts.compute import compute_by_own, compute_routes, reads_blocks
from ds_hf.engine.parallel.experts.exchange import (
    add_up,
    even_splits,
    exchange,
    exchange_counts,
    label,
    outside_graphs,
    pick,
    take,
)
from ds_hf.engine.parallel.tensor.functions import Place
from ds_hf.engine.parallel.tensor.styles import CutModule
from ds_hf.log import warn_once

__all__ = ["DispatchedExperts", "LocalExperts", "dispatched"]


class _Experts(CutModule):
    """What both have.

    Attributes:
        _ds_experts: how many experts there are in all.
        _ds_grouped: one product for all, and not one expert after another (``use_grouped_mm``).
    """

    _ds_experts: int
    _ds_grouped: bool

    def _compute(self, x: Tensor, experts: Tensor, scale: Tensor, ends: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        own = super().forward
        if not self._ds_grouped:  # what transformers puts around it chooses an implementation
            for _ in range(1 + reads_blocks(self)):
                plain = getattr(own, "__wrapped__", None)
                own = own if plain is None else plain.__get__(self)
            return compute_by_own(self, own, x, experts, scale, *args, **kwargs)
        return compute_routes(self, own, x, experts, scale, ends, *args, **kwargs)


class LocalExperts(_Experts):
    """Computes all experts for the tokens of this process."""

    def forward(self, hidden: Tensor, indices: Tensor, weights: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """As ``DispatchedExperts.forward``, of numbers of experts that are all in the model."""
        tokens, k = hidden.reshape(-1, hidden.shape[-1]), indices.shape[-1]
        routes = group(indices.reshape(-1, k), self._ds_experts)
        scale = pick(weights.reshape(-1, k), routes, k)[:, None]
        compute = outside_graphs(self._compute) if reads_blocks(self) else self._compute
        result = compute(take(tokens, routes), routes.group, scale, routes.ends, *args, **kwargs)
        return add_up(result, routes).view(hidden.shape)


class DispatchedExperts(_Experts):
    """Computes its experts' part for the tokens of all processes that share the layer's experts."""

    def forward(self, hidden: Tensor, indices: Tensor, weights: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """What the whole module gives: ``hidden`` ``[..., width]``, of each token ``k`` experts by their number in the
        model (``indices``, ``[..., k]``; other numbers stand for none) and their weights (``[..., k]``)."""

        def compute(x: Tensor, experts: Tensor, scale: Tensor, ends: Tensor) -> Tensor:
            return self._compute(x, experts, scale, ends, *args, **kwargs)

        return outside_graphs(dispatched)(hidden, indices, weights, self._ds_experts, self._ds_place, compute)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if not keep_vars:  # the engine itself only wants names
            warn_once(
                f"state_dict() of the model has of the experts of {self._ds_place.name} those of this process, "
                f"{self._ds_experts // self._ds_place.axis.world_size} of {self._ds_experts}: for whole weights call "
                "accelerator.get_state_dict(engine), engine.save_16bit_model() or engine.export_pretrained() on all "
                "processes",
                about="experts in a state_dict",
            )
        super()._save_to_state_dict(destination, prefix, keep_vars)


_Compute = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def dispatched(
    hidden: Tensor, indices: Tensor, weights: Tensor, number: int, place: Place, compute: _Compute
) -> Tensor:
    """What ``number`` experts give for tokens that choose some of them, each computed where the expert is. Collective.

    Args:
        hidden, indices, weights: see ``DispatchedExperts.forward``.
        place: the processes that have equally many of the experts each.
        compute: gives ``[routes, width]`` for the tokens of routes, ``[routes, width]``, the numbers of their experts
            among those that are here, ascending, their weights, ``[routes, 1]``, and where the routes of each expert
            that is here end, int32 ``[experts]``.
    """
    axis, tokens, k = place.axis, hidden.reshape(-1, hidden.shape[-1]), indices.shape[-1]
    size, count = axis.world_size, number // axis.world_size
    chosen, values = indices.reshape(-1, k).long(), weights.reshape(-1, k)
    if size == 1:
        routes = group(chosen, number)
        total = chosen.numel() if chosen.is_meta else int(routes.totals.sum())
        return _computed(tokens, values, 0, k, routes.first(total), compute).view(hidden.shape)
    rows = group_by_process(chosen, count, axis.rank, size)
    even = even_splits(len(chosen), k, size) if tokens.is_meta else None
    splits = even or exchange_counts(rows.totals, axis, place.name)
    rows = rows.first(sum(splits.sent))
    to, back = (splits.received, splits.sent), (splits.sent, splits.received)

    def sent(x: Tensor) -> Tensor:
        return exchange(x, axis, *to, f"tokens of {place.name}")

    here, labels = sent(take(tokens, rows)), sent(label(values, chosen, rows, count, axis.rank))
    experts = labels.detach().view(BITS[labels.element_size()])[:, :k]
    result = _computed(here, labels, k, k, group(experts, count).first(splits.routes), compute)
    return add_up(exchange(result, axis, *back, f"tokens of {place.name}"), rows).view(hidden.shape)


def _computed(x: Tensor, values: Tensor, offset: int, k: int, routes: Groups, compute: _Compute) -> Tensor:
    """The sum of what experts give for each of ``x``, ``[tokens, width]``, whose ``k`` weights are the columns of
    ``values`` from ``offset`` on."""
    scale, ends, none = pick(values, routes, k, offset)[:, None], routes.ends, not len(routes.order)
    experts, given = routes.group, take(x, routes)
    if none:
        given, scale = torch.cat([given, x.new_zeros(1, x.shape[1])]), torch.cat([scale, scale.new_zeros(1, 1)])
        experts, ends = experts.new_zeros(1), torch.ones_like(ends)
    result = compute(given, experts, scale, ends)
    return add_up(result[:0] if none else result, routes)
