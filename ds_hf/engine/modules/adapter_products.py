"""Layers with adapters that read one input, in one step of autograd: ``x W.T + b + scaling (x A.T) B.T`` for each.

The input is kept once, by whatever number of layers and adapters; the small products are one where nothing is drawn
between (``A`` of all layers stacked); what an adapter adds goes onto the product of the base, and each layer's part of
the input's gradient onto that of the others, without a tensor between. Weights of few bits become values for the one
product, in either direction.

Invariant: a backward that makes a graph differentiates the plain formula, so derivatives of any order are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ds_hf.errors import DsHfError

__all__ = ["SharedCall", "WeightSource", "adapted_products"]

_PER_LAYER = 5  # weight, bias, first, second, dropped


class WeightSource(Protocol):
    """Where the values of a base's weight come from."""

    def values(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """``[inputs, outputs]``, in ``dtype``."""

    def keep(self, values: Tensor) -> None:
        """Forward made them again for the backward that follows at once."""


class SharedCall(NamedTuple):
    """What is no tensor of one call.

    Attributes:
        sources, scalings: of each layer.
        dtype: of the input, the bases' products and the outputs.
        small: in which the adapters compute.
        again: the call is a recomputation.
    """

    sources: Sequence[WeightSource]
    scalings: Sequence[float]
    dtype: torch.dtype
    small: torch.dtype
    again: bool


def adapted_products(call: SharedCall, x: Tensor, tensors: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """The layers' outputs, ``[..., outputs]`` each in ``call.dtype``.

    Args:
        x: ``[..., inputs]``, in ``call.dtype``.
        tensors: of each layer its weight, as its source reads it, its bias ``[outputs]`` if it has one, ``A`` ``[rank,
            inputs]``, ``B`` ``[outputs, rank]``, and what the adapter reads in place of ``x`` where it drops some.
    """
    found: tuple[Tensor, ...] = _Products.apply(call, x, *tensors)  # type: ignore[no-untyped-call]
    return found


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: SharedCall, x: Tensor, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        layers = _layers(tensors)
        rows = _rows(x)
        hidden = _hidden(call, rows, layers)
        outs = []
        for layer, source, scaling, inner in zip(layers, call.sources, call.scalings, hidden, strict=True):
            weight, bias, _, second, _ = layer
            values = source.values(weight, call.dtype)
            if call.again:
                source.keep(values)
            out = x.new_empty(*x.shape[:-1], values.shape[1])
            flat = _rows(out)
            if bias is None:
                torch.mm(rows, values, out=flat)
            else:
                torch.addmm(bias.to(call.dtype), rows, values, out=flat)
            _add(flat, inner, second.to(call.small).t(), scaling)
            outs.append(out)
        kept = x if any(each[2].requires_grad and each[4] is None for each in layers) else None
        ctx.call, ctx.shape = call, x.shape
        ctx.save_for_backward(kept, *hidden, *tensors)
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        x, *rest = ctx.saved_tensors
        hidden, tensors = rest[: len(grads)], rest[len(grads) :]
        if torch.is_grad_enabled():
            return None, *_differentiable(ctx, x, tensors, grads)
        needed = ctx.needs_input_grad[1], _layers(ctx.needs_input_grad[2:])
        used = [index for index, grad in enumerate(grads) if grad is not None]
        found: list[list[Tensor | None]] = [[None] * _PER_LAYER for _ in grads]
        total = _base(ctx, _layers(tensors), grads, used, needed, found) if used else None
        total = _adapters(ctx, x, hidden, _layers(tensors), grads, used, needed, found, total) if used else None
        return None, None if total is None else total.view(ctx.shape), *(each for layer in found for each in layer)


def _base(ctx: Any, layers: Any, grads: Any, used: list[int], needed: Any, found: Any) -> Tensor | None:
    """The gradient of the input by way of the bases; and of biases that train."""
    total: Tensor | None = None
    for index in used:
        weight, _, _, _, _ = layers[index]
        grad = _rows(grads[index])
        if needed[1][index][1]:
            found[index][1] = grad.sum(0)
        if needed[0]:
            values = ctx.call.sources[index].values(weight, ctx.call.dtype).t()
            total = _product(grad, values) if total is None else total.addmm_(grad, values)
    return total


def _adapters(
    ctx: Any,
    x: Tensor | None,
    hidden: Any,
    layers: Any,
    grads: Any,
    used: list[int],
    needed: Any,
    found: Any,
    total: Tensor | None,
) -> Tensor | None:
    """The gradients of ``A`` and ``B``; that of the input goes onto ``total``."""
    call = ctx.call
    ranks = [layers[index][2].shape[0] for index in used]
    inner = hidden[0].new_empty(len(hidden[0]), sum(ranks))  # gradients of what A gave, side by side
    for index, part in zip(used, torch.split(inner, ranks, 1), strict=True):
        _, _, _, second, _ = layers[index]
        grad, scaling = _rows(grads[index]).to(call.small), call.scalings[index]
        part.addmm_(grad, second.to(call.small), beta=0, alpha=scaling)
        if needed[1][index][3]:
            found[index][3] = _product(grad.t(), hidden[index], scaling).to(second.dtype)
    shared = [index for index in used if layers[index][4] is None]
    if len(shared) == len(used):
        if any(needed[1][index][2] for index in used):
            assert x is not None
            firsts = torch.split(_product(inner.t(), _rows(x).to(call.small)), ranks)
            for index, first in zip(used, firsts, strict=True):
                found[index][2] = first.to(layers[index][2].dtype) if needed[1][index][2] else None
        if total is not None:
            _add(total, inner, _stacked([layers[index][2] for index in used], call.small))
        return total
    for index, part in zip(used, torch.split(inner, ranks, 1), strict=True):
        _, _, first, _, dropped = layers[index]
        if dropped is None:
            dropped = x
        elif needed[1][index][4]:
            found[index][4] = _product(part, first.to(call.small)).view(ctx.shape).to(dropped.dtype)
        if needed[1][index][2]:
            found[index][2] = _product(part.t(), _rows(dropped).to(call.small)).to(first.dtype)
        if total is not None and layers[index][4] is None:
            _add(total, part, first.to(call.small))
    return total


def _differentiable(ctx: Any, x: Tensor | None, tensors: Any, grads: Any) -> list[Tensor | None]:
    """Gradients that are functions of the inputs and of ``grads``: for penalties on gradients."""
    if x is None:
        raise DsHfError(
            "a gradient of gradients (create_graph=True) goes through adapters whose first half is frozen, which keep "
            'no input for it: set "ds_hf": {"fused_lora": false}'
        )
    given, needed = [x, *tensors], ctx.needs_input_grad[1:]
    inputs = [each.view_as(each) if needs else each for each, needs in zip(given, needed, strict=True)]
    outs = plain_products(ctx.call, inputs[0], inputs[1:])
    asked = [index for index, needs in enumerate(needed) if needs]
    used = [index for index, grad in enumerate(grads) if grad is not None]
    found: list[Tensor | None] = [None] * len(given)
    if used and asked:
        made = torch.autograd.grad(
            [outs[index] for index in used],
            [inputs[index] for index in asked],
            [grads[index] for index in used],
            create_graph=True,
            allow_unused=True,
        )
        for index, grad in zip(asked, made, strict=True):
            found[index] = grad
    return found


def plain_products(call: SharedCall, x: Tensor, tensors: Sequence[Any]) -> list[Tensor]:
    """The same by operations that autograd knows."""
    outs = []
    for layer, source, scaling in zip(_layers(tensors), call.sources, call.scalings, strict=True):
        weight, bias, first, second, dropped = layer
        out = x @ source.values(weight, call.dtype)
        out = out if bias is None else out + bias.to(call.dtype)
        inner = (x if dropped is None else dropped).to(call.small) @ first.to(call.small).t()
        outs.append((out + inner @ second.to(call.small).t() * scaling).to(call.dtype))
    return outs


def _layers(tensors: Sequence[Any]) -> list[Sequence[Any]]:
    return [tensors[start : start + _PER_LAYER] for start in range(0, len(tensors), _PER_LAYER)]


def _rows(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _hidden(call: SharedCall, rows: Tensor, layers: Sequence[Any]) -> Sequence[Tensor]:
    """What ``A`` of each layer gives, ``[rows, rank]``."""
    if all(each[4] is None for each in layers):
        ranks = [each[2].shape[0] for each in layers]
        inner = _product(rows.to(call.small), _stacked([each[2] for each in layers], call.small).t())
        return torch.split(inner, ranks, 1)
    return [
        _product((rows if dropped is None else _rows(dropped)).to(call.small), first.to(call.small).t())
        for _, _, first, _, dropped in layers
    ]


def _stacked(firsts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return firsts[0].to(dtype) if len(firsts) == 1 else torch.cat([each.to(dtype) for each in firsts])


def _product(left: Tensor, right: Tensor, scaling: float = 1.0) -> Tensor:
    """``scaling * left @ right``, whatever autocast is around: in backward it may be another one than in forward."""
    out = left.new_empty(left.shape[0], right.shape[1])
    return torch.mm(left, right, out=out) if scaling == 1 else out.addmm_(left, right, beta=0, alpha=scaling)


def _add(total: Tensor, left: Tensor, right: Tensor, scaling: float = 1.0) -> None:
    """Onto ``total``, which is rounded once."""
    if total.dtype == left.dtype:
        total.addmm_(left, right, alpha=scaling)
    else:
        total.add_(_product(left, right), alpha=scaling)
