"""Sequence parallelism while a timeline is recorded: what attention allocates where processes share a sequence.

The model runs over one process's part of the tokens. In attention it then has all tokens and a part of the heads, and
the exchange there and back takes a buffer that travels, one that arrives, and what is made of it
(``engine.sequence.exchange``). Nothing travels here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ds_hf.deepspeed_api.sequence.checks import check_model
from ds_hf.engine.parallel.sequence.heads import plan_heads
from ds_hf.memory.prediction import UnpredictableError

__all__ = ["divided_sequences", "part_of"]


def part_of(length: int, processes: int) -> int:
    """Tokens of one process.

    Raises:
        UnpredictableError: the sequence does not divide.
    """
    if length % processes:
        raise UnpredictableError(f"a sequence of {length} tokens does not divide over {processes} processes")
    return length // processes


@contextmanager
def divided_sequences(model: nn.Module, processes: int) -> Iterator[None]:
    """Inside, attention of ``model``, of transformers, is that of one of ``processes`` that share a sequence.

    Raises:
        UnpredictableError: it cannot be divided so.
    """
    if processes == 1:
        yield
        return
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    core: Any = getattr(text, "_attn_implementation", None)
    if core is None or core == "eager":
        raise UnpredictableError(
            f"sequences of {type(model).__name__} are not divided: its attention is {core}; give --attention sdpa"
        )
    try:
        check_model(model, config, core, processes)  # as in training
    except ValueError as error:
        raise UnpredictableError(str(error)) from error
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    whole = ALL_ATTENTION_FUNCTIONS[core]
    ALL_ATTENTION_FUNCTIONS[core] = _divided(whole, processes)
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS[core] = whole


def _divided(core: Callable[..., Any], processes: int) -> Callable[..., Any]:
    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, *args: Any, **kwargs: Any
    ) -> tuple[Any, ...]:
        plan = plan_heads(query.shape[1], key.shape[1], processes)
        if plan.repeats > 1:
            key, value = (part.repeat_interleave(plan.repeats, 1) for part in (key, value))
        query, key, value = _Exchange.apply(1, 2, processes, query, key, value)  # type: ignore[no-untyped-call]
        if isinstance(mask, Tensor):
            mask = mask.new_empty((*mask.shape[:2], query.shape[2], key.shape[2]))
        kwargs.pop("position_ids", None)
        before = getattr(module, "num_key_value_groups", None)
        module.num_key_value_groups = plan.groups
        try:
            context, *others = core(module, query, key, value, mask, *args, **kwargs)
        finally:
            module.num_key_value_groups = before
        (context,) = _Exchange.apply(1, 2, processes, context)  # type: ignore[no-untyped-call]
        return context, *others

    return attention


class _Exchange(torch.autograd.Function):
    """Dimension ``cut`` divided over the processes, dimension ``join`` whole: the memory of it, without the values."""

    @staticmethod
    def forward(ctx: Any, cut: int, join: int, processes: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.way = (join, cut, processes)
        travels = tensors[0].new_empty(sum(tensor.numel() for tensor in tensors))
        arrived = torch.empty_like(travels)
        shapes = []
        for tensor in tensors:
            shape = list(tensor.shape)
            shape[cut] //= processes
            shape[join] *= processes
            shapes.append(shape)
        assert arrived.numel() == sum(map(math.prod, shapes))
        return tuple(arrived.new_empty(shape) for shape in shapes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, None, *_Exchange.apply(*ctx.way, *grads)  # type: ignore[no-untyped-call]
