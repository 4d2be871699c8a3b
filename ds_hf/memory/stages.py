"""One stage of a pipeline while a timeline is recorded: what ``engine.pipeline`` keeps for one micro-batch.

It has the stage's layers of the model, as ``PipelineModule.from_transformers`` divides them. Hidden states arrive in a
buffer of their own, whose gradient goes back; what is sent on stays until its gradient has come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ds_hf.engine.parallel.pipeline.division import LayerDivision, divide_layers
from ds_hf.engine.parallel.pipeline.holes import Skip, Swapped, is_tied, layers_of, parts_of, with_holes
from ds_hf.engine.zero.replicas import tie_over_stages
from ds_hf.errors import ConfigError
from ds_hf.memory.prediction import UnpredictableError

__all__ = ["Stage", "division_of"]

_NAMES = ("attention_mask", "position_ids")


def division_of(model: nn.Module, stages: int, chunks: int) -> LayerDivision:
    """The layers of each stage, by their parameters.

    Raises:
        UnpredictableError: it is not a model of transformers that is divided so, or has too few layers.
    """
    if not hasattr(model, "base_model") or not hasattr(model, "config"):
        raise UnpredictableError(f"stages of a pipeline are predicted for models of transformers, not {type(model)}")
    try:
        return divide_layers(layers_of(_inner(model)), stages, "parameters", chunks=chunks)
    except ConfigError as error:
        raise UnpredictableError(error.faults[0].message) from error


def _inner(model: Any) -> Any:
    """What a script gives of PEFT's: the model with the adapters in it."""
    inner = getattr(model, "get_base_model", None)
    return model if inner is None else inner()


class Stage(nn.Module):
    """Forward of all chunks of one stage; backward of the number it returns is theirs.

    Args:
        model: a copy, of which the stage takes what it has; on the meta device.
    """

    _model: Any
    _base: Any
    _head: str | None

    def __init__(self, model: Any, division: LayerDivision, stage: int) -> None:
        super().__init__()
        model = _inner(model)
        base, head = parts_of(model)
        self._bounds, self._count = division.bounds(stage), len(layers_of(model))
        here = {layer for bounds in self._bounds for layer in range(*bounds)}
        blocks, norm, last = list(base.layers), base.norm, self._count - 1
        tied = head is not None and is_tied(model, head)
        ends = {division.stage_of(0), division.stage_of(last)} if tied else set()
        if tied and len(ends) > 1:
            tie_over_stages(base.embed_tokens.weight, "the tied embedding", sorted(ends))
        if head is not None and last not in here:
            setattr(model, head, Skip())
        if 0 not in here and stage not in ends:
            base.embed_tokens = Skip()
        self._holes = [with_holes(blocks, norm, range(*bounds)) for bounds in self._bounds]
        base.layers, base.norm = with_holes(blocks, norm, here)
        self.__dict__.update(_model=model, _base=base, _head=head)
        self.config = model.config
        self._no_split_modules = sorted(getattr(model, "_no_split_modules", None) or ())
        for name, child in model.named_children():
            self.add_module(name, child)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **others: Any) -> Tensor:
        """The loss, or a number in place of what is sent; of all chunks together."""
        given = {name: others[name] for name in _NAMES if others.get(name) is not None}
        found: list[Tensor] = []
        for (start, stop), holes in zip(self._bounds, self._holes, strict=True):
            source: dict[str, Tensor] = {"input_ids": input_ids}
            if start > 0:
                source = {"inputs_embeds": self._received(input_ids)}
            with Swapped(self._base, *holes):
                if stop == self._count and self._head is not None:
                    logits = self._model(**source, **given, use_cache=False).logits
                    size = self.config.get_text_config().vocab_size
                    found.append(self._model.loss_function(logits=logits, labels=labels, vocab_size=size))
                    del logits
                else:
                    sent = self._base(**source, **given, use_cache=False).last_hidden_state
                    found.append(_Sent.apply(sent))  # type: ignore[no-untyped-call]
        return _total(found)

    def _received(self, input_ids: Tensor) -> Tensor:
        dtype = next((p.dtype for p in self.parameters() if p.is_floating_point()), torch.float32)
        size = self.config.get_text_config().hidden_size
        return torch.empty(*input_ids.shape, size, dtype=dtype, device=input_ids.device).requires_grad_()


def _total(numbers: Sequence[Tensor]) -> Tensor:
    total = numbers[0]
    for number in numbers[1:]:
        total = total + number
    return total


class _Sent(torch.autograd.Function):
    """What is sent is kept, and a gradient of its size comes back."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        return hidden.new_empty(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (hidden,) = ctx.saved_tensors
        return torch.empty_like(hidden)
