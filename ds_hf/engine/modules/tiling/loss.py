"""Losses tile by tile, so that the logits of all positions never exist at once.

A loss is the last thing that a model computes, so its gradient is taken in forward, beside each tile, and only
multiplied in backward: no logits are computed twice. Of a head of ``[vocabulary, hidden]`` the gradient is kept between
forward and backward, and that of the hidden states.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ds_hf.engine.modules.tiling.compute import GradientSums, apply, bounds, computed_tiles, deliver, leaves_behind
from ds_hf.engine.modules.tiling.logits import DeferredLogits, PartialLogits, product_dtype
from ds_hf.engine.parallel.sequence.losses import gather_whole
from ds_hf.engine.parallel.tensor.functions import Place, copy_to
from ds_hf.engine.parallel.tensor.styles import place_of
from ds_hf.engine.zero.hooks import untracked_calls

__all__ = ["causal_lm_loss", "divisor", "linear_cross_entropy", "rows_cross_entropy", "tiled_loss"]

_LOGITS_NBYTES = 512 << 20  # of one chunk, in fp32
_LEAST_ROWS = 1024  # with fewer, adding up the gradient of the weight takes a third of the time of the products

# -- any loss -------------------------------------------------------------------------------------------------------


def tiled_loss(
    fn: Callable[..., Tensor], tensors: Sequence[Tensor], weights: Sequence[nn.Parameter], tiles: int, *, mean: bool
) -> Tensor:
    """The sum, or the mean, of ``fn`` over the tiles of ``tensors`` (``[positions, ...]`` each).

    Args:
        fn: gives one number for the tiles of one stretch. What else it reads are weights.
        tensors: the first is what gradients go back to.
        weights: those that ``fn`` reads, as far as known; others get their gradient in backward all the same.
    """
    weights = [weight for weight in dict.fromkeys(weights) if weight.requires_grad]
    cuts = bounds(len(tensors[0]), tiles)
    share = 1 / len(cuts) if mean else 1.0
    wanted, count = torch.is_grad_enabled(), len(tensors)
    return apply(_Loss, fn, cuts, share, wanted, count, *tensors, *weights)


class _Loss(torch.autograd.Function):
    """``tiled_loss``."""

    @staticmethod
    def forward(
        ctx: Any,
        fn: Callable[..., Tensor],
        cuts: Sequence[tuple[int, int]],
        share: float,
        wanted: bool,
        count: int,
        *tensors: Tensor,
    ) -> Tensor:
        x, others, weights = tensors[0], tensors[1:count], tensors[count:]
        x_grad = torch.zeros_like(x) if wanted and ctx.needs_input_grad[5] else None
        sums, beside, outputs = GradientSums(len(weights)), list[Tensor](), []
        with untracked_calls():
            for start, end in cuts:
                tile = x[start:end].detach().requires_grad_(x_grad is not None)
                with torch.set_grad_enabled(wanted):
                    output = fn(tile, *(other[start:end] for other in others))
                outputs.append(output.detach().reshape(()))
                if not output.requires_grad:
                    continue
                own = [tile] if x_grad is not None else []
                if not beside:
                    beside = leaves_behind(output, [*own, *weights])
                    sums.sums += [None] * len(beside)
                grads = torch.autograd.grad(output, [*own, *weights, *beside], allow_unused=True)
                if x_grad is not None and grads[0] is not None:
                    x_grad[start:end] = grads[0]
                sums.add(grads[len(own) :])
        ctx.share, ctx.count, ctx.weights, ctx.beside = share, count, weights, beside
        ctx.save_for_backward(x_grad, *kept(sums.sums, [*weights, *beside]))
        return torch.stack(outputs).sum() * share

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x_grad, *sums = ctx.saved_tensors
        factor = grad.float() * ctx.share
        scaled = [times(s, factor, weight) for s, weight in zip(sums, [*ctx.weights, *ctx.beside], strict=True)]
        known = len(ctx.weights)
        deliver(ctx.beside, scaled[known:])
        own = None if x_grad is None else times(x_grad, factor, x_grad)
        return (*[None] * 5, own, *[None] * (ctx.count - 1), *scaled[:known])


def kept(sums: Sequence[Tensor | None], of: Sequence[Tensor]) -> list[Tensor | None]:
    """Gradients as they wait for backward: in bf16 if that is their tensor's dtype; of fp16, whose range the loss scale
    has not widened yet, as they are."""
    narrow = torch.bfloat16
    return [None if s is None else s.to(narrow) if t.dtype is narrow else s for s, t in zip(sums, of, strict=True)]


def times(grad: Tensor | None, factor: Tensor, like: Tensor) -> Tensor | None:
    """``grad * factor`` in the dtype of ``like``."""
    return None if grad is None else (grad * factor).to(like.dtype)


# -- cross entropy over a head ----------------------------------------------------------------------------------------


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    place: Place | None = None,
) -> Tensor:
    """``cross_entropy(linear(hidden, weight, bias).float(), labels, reduction="sum")``, ``[]`` in fp32.

    Liger's kernel where it is installed, there is a GPU and the vocabulary is whole; else plain torch.

    Args:
        hidden: ``[positions, hidden]``. weight: ``[vocabulary, hidden]``. labels: ``[positions]``, int64.
        place: of a head whose vocabulary is cut; ``weight`` and ``bias`` are its parts.
    """
    if place is not None:
        hidden = copy_to(hidden, place, owns_gradient=True)
        place.copied[0] = None
    elif hidden.is_cuda and (liger := _liger()) is not None:
        fused: Tensor = liger(hidden, weight, labels, bias=bias, ignore_index=ignore_index, reduction="sum")
        return fused.float()
    wanted, words = torch.is_grad_enabled(), _Words(place, len(weight))
    return apply(_LinearCrossEntropy, hidden, weight, bias, labels, ignore_index, wanted, words)


class _Words:
    """Which words' logits are here: all, or the part of a cut head.

    Args:
        place: of the head; ``None``: all.
        count: words that are here.
    """

    def __init__(self, place: Place | None, count: int) -> None:
        self.place, self.count = place, count
        self.first = 0 if place is None else place.axis.rank * count

    def find(self, labels: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
        """Of each label its place among the words here (0 where it is not here), and whether it is: ``[rows]``."""
        if self.place is not None:
            labels = labels - self.first
            counted = counted & (labels >= 0) & (labels < self.count)
        return torch.where(counted, labels, 0), counted

    def of_all(self, normaliser: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """log sum exp, and the label's logit (0 where it is not here), of all words instead of those here: ``[rows]``.

        One collective, of which every process makes the same numbers.
        """
        if self.place is None:
            return normaliser, chosen
        both, axis = torch.stack((normaliser, chosen)).unsqueeze(0), self.place.axis
        if both.is_meta:
            parts = both.expand(axis.world_size, -1, -1)
        else:
            parts = gather_whole(both, axis, 0, f"normalisers of {self.place.forward}")
        return torch.logsumexp(parts[:, 0], 0), parts[:, 1].sum(0)


@functools.cache
def _liger() -> Callable[..., Any] | None:
    """Liger's fused linear cross entropy, summing the gradient of the weight in fp32 where it can."""
    if importlib.util.find_spec("liger_kernel") is None:
        return None
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy as fused

    if "accum_dtype" in inspect.signature(fused).parameters:
        return functools.partial(fused, accum_dtype=torch.float32)
    return fused  # type: ignore[no-any-return]


class _LinearCrossEntropy(torch.autograd.Function):
    """``linear_cross_entropy`` in torch's operators."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        ignore_index: int,
        wanted: bool,
        words: _Words,
    ) -> Tensor:
        dtype = product_dtype(hidden.device, weight.dtype)
        needs = [wanted and need for need in ctx.needs_input_grad[:3]]
        chunks = _Chunks(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype), needs, words)
        kind = hidden.device.type
        with torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext():
            loss = chunks.run(labels.reshape(-1), ignore_index)
        ctx.dtypes = [None if t is None else t.dtype for t in (hidden, weight, bias)]
        ctx.save_for_backward(*chunks.grads(weight))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        found = [
            None if kept_grad is None else (kept_grad * grad).to(dtype)
            for kept_grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*found, None, None, None, None)


class _Chunks:
    """Loss and gradients of stretches of positions, one after another.

    Args:
        hidden, weight, bias: in the dtype of the product.
        needs: which of them want gradients.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: Sequence[bool], words: _Words
    ) -> None:
        self.hidden, self.weight, self.bias, self.words = hidden, weight, bias, words
        self.of_hidden = torch.empty_like(hidden) if needs[0] else None
        self.of_weight, self.of_bias = GradientSums(1), GradientSums(1)
        self.needs = needs

    def run(self, labels: Tensor, ignore_index: int) -> Tensor:
        """The loss, summed in fp32."""
        rows = max(_LOGITS_NBYTES // (4 * len(self.weight)), _LEAST_ROWS)
        loss = torch.zeros((), dtype=torch.float32, device=self.hidden.device)
        for _, (start, end) in computed_tiles(bounds(len(self.hidden), -(-len(self.hidden) // rows)), self.hidden):
            if end > start:
                loss += self._chunk(start, end, labels[start:end], ignore_index)
        return loss

    def _chunk(self, start: int, end: int, labels: Tensor, ignore_index: int) -> Tensor:
        hidden = self.hidden[start:end]
        logits = F.linear(hidden, self.weight, self.bias).float()
        counted = labels != ignore_index
        places, here = self.words.find(labels, counted)
        chosen = torch.where(here, logits.gather(1, places.unsqueeze(1)).squeeze(1), 0.0)
        normaliser, chosen = self.words.of_all(torch.logsumexp(logits, dim=1), chosen)
        loss = ((normaliser - chosen) * counted).sum()
        if any(self.needs):
            grad = logits.sub_(normaliser.unsqueeze(1)).exp_()  # the softmax
            grad.scatter_add_(1, places.unsqueeze(1), -here.unsqueeze(1).to(grad.dtype))
            self._backward(start, end, grad.mul_(counted.unsqueeze(1)).to(hidden.dtype))
        return loss

    def _backward(self, start: int, end: int, grad: Tensor) -> None:
        if self.of_hidden is not None:
            torch.mm(grad, self.weight, out=self.of_hidden[start:end])
        if self.needs[1]:
            self.of_weight.add([grad.t() @ self.hidden[start:end]])
        if self.needs[2]:
            self.of_bias.add([grad.sum(0, dtype=torch.float32)])

    def grads(self, weight: Tensor) -> list[Tensor | None]:
        """Of the three, as they wait for backward."""
        return [self.of_hidden, *kept(self.of_weight.sums, [weight]), *self.of_bias.sums]


# -- cross entropy of logits that are there ---------------------------------------------------------------------------


def rows_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    rows: int | None = None,
    place: Place | None = None,
) -> Tensor:
    """``cross_entropy(logits.float(), labels, reduction="none")``, ``[rows]`` in fp32, a few rows at a time: no fp32
    copy of the logits exists, and their gradient is made in their own dtype. Of a cut head in fp64, if the logits are.

    Args:
        logits: ``[rows, vocabulary]``. labels: ``[rows]``, int64.
        rows: in one step; default as many as are 512 MiB in fp32.
        place: of a head whose vocabulary is cut; ``logits`` are those of the words that are here.
    """
    rows = rows or max(_LOGITS_NBYTES // (4 * max(logits.shape[-1], 1)), 1)
    return apply(_RowsCrossEntropy, logits, labels, ignore_index, rows, _Words(place, logits.shape[-1]))


class _RowsCrossEntropy(torch.autograd.Function):
    """``rows_cross_entropy``."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, ignore_index: int, rows: int, words: _Words) -> Tensor:
        counted = labels != ignore_index
        places, here = words.find(labels, counted)
        places = places.unsqueeze(1)
        dtype = torch.float32 if words.place is None else torch.promote_types(logits.dtype, torch.float32)
        normaliser = torch.empty(len(logits), dtype=dtype, device=logits.device)
        chosen = torch.empty_like(normaliser)
        for start in range(0, len(logits), rows):
            part = logits[start : start + rows].to(dtype)
            normaliser[start : start + rows] = torch.logsumexp(part, dim=1)
            chosen[start : start + rows] = part.gather(1, places[start : start + rows]).squeeze(1)
        normaliser, chosen = words.of_all(normaliser, torch.where(here, chosen, 0.0))
        ctx.rows = rows
        ctx.save_for_backward(logits, places, counted, here, normaliser)
        return torch.where(counted, normaliser - chosen, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "The chunked cross entropy has no second derivative; backward with create_graph=True is not supported"
            )
        logits, places, counted, here, normaliser = ctx.saved_tensors
        factor, ones = torch.where(counted, grad.to(normaliser.dtype), 0.0), -here.unsqueeze(1).to(normaliser.dtype)
        found = torch.empty_like(logits)
        for start in range(0, len(logits), ctx.rows):
            part = slice(start, start + ctx.rows)
            softmax = (logits[part] - normaliser[part].unsqueeze(1)).exp_()  # in fp32, as its second half is
            softmax.scatter_add_(1, places[part], ones[part].to(softmax.dtype))  # fp64 where the logits are
            found[part] = softmax.mul_(factor[part].unsqueeze(1))
        return found, None, None, None, None


# -- as models of transformers call it --------------------------------------------------------------------------------


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | float | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    rows: int | None = None,
    **unused: Any,
) -> Tensor:
    """transformers' ``ForCausalLMLoss``, of logits, of ``DeferredLogits`` or of ``PartialLogits``.

    Args:
        labels: as long as ``logits``; a position predicts the label of the next one.
        num_items_in_batch: by which the sum is divided; default the labels that count.
        shift_labels: labels that are at the position that predicts them.
        rows: of ``rows_cross_entropy``.
    """
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    targets = shift_labels.reshape(-1).to(logits.device)
    if isinstance(logits, DeferredLogits) and logits.made is None and logits.shape[-1] == vocab_size:
        head, hidden, logits.spent = logits.head, logits.hidden, True
        total = linear_cross_entropy(
            hidden.reshape(-1, hidden.shape[-1]),
            head.weight,
            targets,
            head.bias,
            ignore_index=ignore_index,
            place=place_of(head),
        )
    elif isinstance(logits, PartialLogits) and logits.shape[-1] == vocab_size:
        part, place = logits.part.reshape(-1, logits.part.shape[-1]), place_of(logits.head)
        total = rows_cross_entropy(part, targets, ignore_index=ignore_index, rows=rows, place=place).sum()
    else:
        total = rows_cross_entropy(logits.reshape(-1, vocab_size), targets, ignore_index=ignore_index, rows=rows).sum()
    items = (targets != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
    items = items.to(total.device) if isinstance(items, Tensor) else items or torch.zeros_like(total)
    mean = total / divisor(items)
    return mean.masked_fill(items == 0, torch.nan) if isinstance(items, Tensor) else mean  # torch's mean over nothing


def divisor(items: Tensor | float) -> Tensor | float:
    """``items`` (a number, or integers or floats of any shape), and 1 for 0: gradients of 0 that wait for what a sum
    over nothing is divided by stay 0, as torch's do, where infinity would make them nan."""
    return torch.where(items != 0, items, 1) if isinstance(items, Tensor) else items or 1
