"""Layers with adapters that read one input, in one step of autograd: ``x W.T + b + scaling (x A.T) B.T`` for each.

DoRA multiplies the sum, without ``b``, by ``m / norm``: that of the rows of ``W + scaling B A``, through which no
gradient goes.

The input is kept once, by whatever number of layers and adapters; the small products are one where nothing is drawn
between (``A`` of all layers stacked); what an adapter adds goes onto the product of the base, and each layer's part of
the input's gradient onto that of the others, without a tensor between. Weights of few bits become values for the one
product, in either direction. Where the input is ``act(gate) * up`` of an MLP, those two are kept in its place, and its
gradient goes to them at once: nothing keeps the product, nor what ``act`` gave. All of this is called by the host for
each layer of a model, so it makes few calls.

Invariant: a backward that makes a graph differentiates the plain formula, so derivatives of any order are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from ds_hf.engine.ops.rows import Activation, activation, halves_backward
from ds_hf.errors import DsHfError

__all__ = ["Operands", "SharedCall", "WeightSource", "adapted_products"]


class WeightSource(Protocol):
    """Where the values of a base's weight come from."""

    def values(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """``[outputs, inputs]``, in ``dtype``."""

    def keep(self, values: Tensor) -> None:
        """Forward made them again for the backward that follows at once."""


class SharedCall(NamedTuple):
    """What is no tensor of one call.

    Attributes:
        sources, scalings: of each layer.
        dtype: of the input, the bases' products and the outputs.
        small: in which the adapters compute.
        again: the call is a recomputation.
        act: of ``act(gate) * up``, where that is the input.
    """

    sources: Sequence[WeightSource]
    scalings: Sequence[float]
    dtype: torch.dtype
    small: torch.dtype
    again: bool
    act: Activation = "silu"


class Operands(NamedTuple):
    """Of each layer: its weight, as its source reads it, its bias ``[outputs]`` if it has one, ``A`` ``[rank,
    inputs]``, ``B`` ``[outputs, rank]``, what the adapter reads in place of the input where it drops some, and ``m``
    ``[outputs]`` of DoRA."""

    weights: Sequence[Any]
    biases: Sequence[Any]
    firsts: Sequence[Any]
    seconds: Sequence[Any]
    dropped: Sequence[Any]
    magnitudes: Sequence[Any]

    @staticmethod
    def of(flat: Sequence[Any]) -> Operands:
        n = len(flat) // len(Operands._fields)
        return Operands(*(flat[start : start + n] for start in range(0, len(flat), n)))


def adapted_products(
    call: SharedCall, x: Tensor, layers: Operands, halves: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, ...]:
    """The layers' outputs, ``[..., outputs]`` each in ``call.dtype``, of ``x``: ``[..., inputs]`` in ``call.dtype``.

    Args:
        halves: gate and up, of the shape and dtype of ``x``, where ``x`` is ``call.act(gate) * up``, goes to one layer
            whose ``A`` trains, and none of it is dropped.
    """
    given = (x, None, None) if halves is None else (x.detach(), *halves)
    found: tuple[Tensor, ...] = _Products.apply(call, *given, *chain.from_iterable(layers))  # type: ignore[no-untyped-call]
    return found


_BEFORE = 4  # what _Products is given before the operands


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: SharedCall, x: Tensor, gate: Tensor | None, up: Tensor | None, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        layers = Operands.of(tensors)
        hidden = _hidden(call, _rows(x), layers)
        outs: list[Tensor] = []
        scaled: list[Tensor] = []  # of DoRA: what is multiplied, and the norms
        for index, source in enumerate(call.sources):
            bias, magnitude = layers.biases[index], layers.magnitudes[index]
            values = source.values(layers.weights[index], call.dtype)
            if call.again:
                source.keep(values)
            plain = bias is None or magnitude is not None
            out = F.linear(x, values) if plain else _with_bias(x, values, _cast(bias, call.dtype))
            second = _cast(layers.seconds[index], call.small)
            _add(_rows(out), hidden[index], second.t(), call.scalings[index])
            if magnitude is not None:
                norm = _norm(values, layers.firsts[index], second, call.scalings[index])
                scaled += [_rows(out), norm]
                out = out * (magnitude / norm)
                out = out if bias is None else out.add_(bias)
            outs.append(out)
        ctx.call, ctx.shape = call, x.shape
        kept = x if gate is None and _reads_input(layers) else None
        ctx.save_for_backward(kept, gate, up, *hidden, *scaled, *tensors)
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            return None, *_differentiable(ctx, grads)
        device = next((grad.device.type for grad in grads if grad is not None), None)
        if device is None:
            return (None,) * len(ctx.needs_input_grad)
        if device != "meta" and torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):  # dtypes are those of forward
                return None, *_gradients(ctx, grads)
        return None, *_gradients(ctx, grads)


def _gradients(ctx: Any, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Of the input, of the two that stand for it, and of all operands."""
    call: SharedCall = ctx.call
    (x, gate, up), hidden, scaled, layers = _saved(ctx, len(grads))
    of_gate: Tensor | None = None
    of_up: Tensor | None = None
    count, needed = len(grads), Operands.of(ctx.needs_input_grad[_BEFORE:])
    found: list[Tensor | None] = [None] * (len(ctx.needs_input_grad) - _BEFORE)
    of_bias, of_first, of_second = count, 2 * count, 3 * count
    total: Tensor | None = None
    inner: list[Tensor] = []  # gradients of what A gave
    used = [index for index in range(count) if grads[index] is not None]
    for index in used:
        grad = _rows(grads[index])
        if needed.biases[index]:
            found[of_bias + index] = grad.sum(0)
        if (magnitude := layers.magnitudes[index]) is not None:
            whole, norm = scaled[index]
            if needed.magnitudes[index]:
                found[5 * count + index] = (grad * whole).sum(0).div_(norm)
            grad = grad * (magnitude / norm)
        if ctx.needs_input_grad[1] or gate is not None:
            values = call.sources[index].values(layers.weights[index], call.dtype)
            total = torch.mm(grad, values) if total is None else total.addmm_(grad, values)
        grad, second = _cast(grad, call.small), layers.seconds[index]
        inner.append(_scaled(grad, _cast(second, call.small), call.scalings[index]))
        if needed.seconds[index]:
            part = _scaled(grad.t(), hidden[index], call.scalings[index])
            found[of_second + index] = _cast(part, second.dtype)
    if all(layers.dropped[index] is None for index in used):
        joined = inner[0] if len(used) == 1 else torch.cat(inner, 1)
        if total is not None:
            _add(total, joined, _stacked([layers.firsts[index] for index in used], call.small))
        if gate is not None and up is not None and total is not None:
            of_gate, of_up, x = halves_backward(total, _rows(gate), _rows(up), call.act)
            total, of_gate, of_up = None, of_gate.view(ctx.shape), of_up.view(ctx.shape)
        if any(needed.firsts[index] for index in used):
            whole = torch.mm(joined.t(), _cast(_rows(x), call.small))
            parts = [whole] if len(used) == 1 else torch.split(whole, [each.shape[1] for each in inner])
            for index, part in zip(used, parts, strict=True):
                if needed.firsts[index]:
                    found[of_first + index] = _cast(part, layers.firsts[index].dtype)
    else:
        for index, part in zip(used, inner, strict=True):
            _through_dropout(call, ctx.shape, x, layers, needed, found, total, index, part)
    return [None if total is None else total.view(ctx.shape), of_gate, of_up, *found]


def _through_dropout(
    call: SharedCall,
    shape: torch.Size,
    x: Tensor | None,
    layers: Operands,
    needed: Operands,
    found: list[Tensor | None],
    total: Tensor | None,
    index: int,
    part: Tensor,
) -> None:
    """The gradients of one layer's ``A`` and of what it read."""
    count, first, dropped = len(layers.firsts), layers.firsts[index], layers.dropped[index]
    if dropped is None and total is not None:
        _add(total, part, _cast(first, call.small))
    if needed.dropped[index]:
        found[4 * count + index] = _cast(torch.mm(part, _cast(first, call.small)).view(shape), dropped.dtype)
    if needed.firsts[index]:
        rows: Any = x if dropped is None else dropped
        found[2 * count + index] = _cast(torch.mm(part.t(), _cast(_rows(rows), call.small)), first.dtype)


def _differentiable(ctx: Any, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Gradients that are functions of the inputs and of ``grads``: for penalties on gradients."""
    (x, gate, up), _, _, layers = _saved(ctx, len(grads))
    if x is None and gate is None and any(dropped is None for dropped in layers.dropped):
        raise DsHfError(
            "a gradient of gradients (create_graph=True) goes through adapters whose first half is frozen, which keep "
            'no input for it: set "ds_hf": {"fused_lora": false}'
        )
    if x is None and gate is None:  # adapters read what dropout left; x is not in the gradient of the base's product
        zeros = layers.dropped[0].new_zeros(ctx.shape, dtype=ctx.call.dtype)
        x = zeros.requires_grad_(ctx.needs_input_grad[1])
    given, needed = [x, gate, up, *chain.from_iterable(layers)], ctx.needs_input_grad[1:]
    inputs = [each.view_as(each) if needs else each for each, needs in zip(given, needed, strict=True)]
    read, gate, up = inputs[: _BEFORE - 1]
    read = read if gate is None else activation(ctx.call.act, gate) * up
    outs = plain_products(ctx.call, read, Operands.of(inputs[_BEFORE - 1 :]))
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


def plain_products(call: SharedCall, x: Tensor, layers: Operands) -> list[Tensor]:
    """The same by operations that autograd knows."""
    outs = []
    for source, scaling, weight, bias, first, second, dropped, magnitude in zip(
        call.sources, call.scalings, *layers, strict=True
    ):
        values = source.values(weight, call.dtype)
        inner = (x if dropped is None else dropped).to(call.small) @ first.to(call.small).t()
        out = (x @ values.t() + inner @ second.to(call.small).t() * scaling).to(call.dtype)
        if magnitude is not None:
            out = out * (magnitude / _norm(values, first.detach(), second.detach(), scaling))
        outs.append(out if bias is None else out + bias.to(call.dtype))
    return outs


def _norm(values: Tensor, first: Tensor, second: Tensor, scaling: float) -> Tensor:
    """Of the rows of ``W + scaling B A``: ``[outputs]``."""
    norm: Tensor = torch.linalg.vector_norm(torch.addmm(values, second, first, alpha=scaling), dim=1)
    return norm


def _saved(
    ctx: Any, count: int
) -> tuple[list[Tensor | None], list[Tensor], dict[int, tuple[Tensor, Tensor]], Operands]:
    """The input or the two that stand for it, what A gave, of the layers with DoRA what was multiplied and the norms,
    and the operands."""
    x, gate, up, *rest = ctx.saved_tensors
    operands = len(ctx.needs_input_grad) - _BEFORE
    layers = Operands.of(rest[len(rest) - operands :])
    pairs = iter(rest[count : len(rest) - operands])
    scaled = {i: (next(pairs), next(pairs)) for i, each in enumerate(layers.magnitudes) if each is not None}
    return [x, gate, up], rest[:count], scaled, layers


def _reads_input(layers: Operands) -> bool:
    pairs = zip(layers.firsts, layers.dropped, strict=True)
    return any(dropped is None and first.requires_grad for first, dropped in pairs)


def _hidden(call: SharedCall, rows: Tensor, layers: Operands) -> Sequence[Tensor]:
    """What ``A`` of each layer gives, ``[rows, rank]``."""
    if any(dropped is not None for dropped in layers.dropped):
        return [
            torch.mm(_cast(rows if dropped is None else _rows(dropped), call.small), _cast(first, call.small).t())
            for first, dropped in zip(layers.firsts, layers.dropped, strict=True)
        ]
    inner = torch.mm(_cast(rows, call.small), _stacked(layers.firsts, call.small).t())
    return [inner] if len(layers.firsts) == 1 else torch.split(inner, [each.shape[0] for each in layers.firsts], 1)


def _with_bias(x: Tensor, values: Tensor, bias: Tensor) -> Tensor:
    """``F.linear``, which may give a view, in which users of a function's output may not write."""
    out = x.new_empty(*x.shape[:-1], values.shape[0])
    torch.addmm(bias, _rows(x), values.t(), out=_rows(out))
    return out


def _rows(x: Any) -> Any:
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _cast(x: Any, dtype: torch.dtype) -> Any:
    return x if x.dtype is dtype else x.to(dtype)


def _stacked(firsts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return _cast(firsts[0], dtype) if len(firsts) == 1 else torch.cat([_cast(each, dtype) for each in firsts])


def _scaled(left: Tensor, right: Tensor, scaling: float) -> Tensor:
    """``scaling * left @ right``."""
    if scaling == 1:
        return torch.mm(left, right)
    return torch.addmm(left.new_empty(()), left, right, beta=0, alpha=scaling)


def _add(total: Tensor, left: Tensor, right: Tensor, scaling: float = 1.0) -> None:
    """Onto ``total``, which is rounded once."""
    if total.dtype is left.dtype:
        total.addmm_(left, right, alpha=scaling)
    else:
        total.add_(torch.mm(left, right), alpha=scaling)
