"""Attention of transformers over divided sequences: what stands in ``ALL_ATTENTION_FUNCTIONS`` in place of a core.

The entry of the core's own name is replaced, and not a name of our own made, because models ask for names such as
"flash_attention_2" in other places. It calls the core as it is for every model that is not bound to a
``SequenceDivision``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ds_hf.deepspeed_api.sequence.division import SequenceDivision, division_of
from ds_hf.engine.parallel.sequence.heads import gather_tokens, scatter_tokens

__all__ = ["attend", "divided_attention", "replace_core"]

_CORE = "_ds_hf_core"


def replace_core(name: str) -> None:
    """Have transformers' attention of this name divide what is bound; a second call does nothing."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    core = ALL_ATTENTION_FUNCTIONS[name]
    if not hasattr(core, _CORE):
        ALL_ATTENTION_FUNCTIONS[name] = divided_attention(core)


def divided_attention(core: Callable[..., Any]) -> Callable[..., Any]:
    """``core`` for the sequences of bound models, ``[batch, heads, tokens, dim]``."""
    # Else compiled blocks would trace the log of the collectives.
    divide = torch.compiler.disable(attend)  # type: ignore[no-untyped-call]

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        division = division_of(module)
        if division is None or not division.active:
            return core(module, query, key, value, attention_mask, *args, **kwargs)
        return divide(core, division, module, query, key, value, attention_mask, *args, **kwargs)

    setattr(attention, _CORE, core)
    return attention


def attend(
    core: Callable[..., Any],
    division: SequenceDivision,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Attention over the tokens of all processes, of this process's tokens.

    Args:
        query: ``[batch, heads, tokens, dim]``; key, value: ``[batch, kv_heads, tokens, dim]``.
        attention_mask: of the whole sequence, as the core takes it; see ``masks``.

    Returns:
        context ``[batch, tokens, heads, dim]``, and what else the core gives.

    Raises:
        ValueError: layers that cannot be divided so.
    """
    axis = division.axis
    what = division.names.get(id(module), type(module).__name__)
    _check(division, what, query, key, attention_mask, kwargs)
    division.calls += 1
    heads = query.shape[1]
    query, key, value, groups = gather_tokens(query, key, value, axis, what)
    if kwargs.get("s_aux") is not None:  # learned sinks, one for each head
        kwargs["s_aux"] = kwargs["s_aux"].unflatten(0, (axis.world_size, heads // axis.world_size))[axis.rank]
    if (positions := kwargs.get("position_ids")) is not None and positions.shape[-1] != query.shape[2]:
        kwargs["position_ids"] = division.whole(positions, "position_ids") if division.by_positions else None
    with _groups(module, groups):
        context, *others = core(module, query, key, value, attention_mask, *args, **kwargs)
    if context.ndim == 3:
        context = context.unflatten(-1, (heads // axis.world_size, -1))
    return scatter_tokens(context, axis, what), *others


@contextmanager
def _groups(module: nn.Module, groups: int) -> Iterator[None]:
    """The core reads from the module how many query heads share a key head; here keys may have been repeated."""
    before = getattr(module, "num_key_value_groups", None)
    if before is None or before == groups:
        yield
        return
    module.num_key_value_groups = groups  # type: ignore[assignment]
    try:
        yield
    finally:
        module.num_key_value_groups = before


def _check(
    division: SequenceDivision, what: str, query: Tensor, key: Tensor, mask: Any, kwargs: dict[str, Any]
) -> None:
    tokens = query.shape[2]
    whole = tokens * division.axis.world_size
    if key.shape[2] != tokens:
        raise ValueError(
            f"{what} attends from {tokens} to {key.shape[2]} tokens: sequence parallelism divides self-attention "
            "without a cache of earlier tokens. Call generate() with disable_in_eval=True and the model in eval mode; "
            "encoders with cross-attention cannot be divided"
        )
    seen = None if mask is None else mask.shape[-1]
    if seen is not None and seen != whole:
        raise ValueError(
            f"the attention mask of {what} is for {seen} of the {whole} tokens: the model makes masks itself, from the "
            "part of the sequence that is here. Sequence parallelism needs a model that takes them from "
            "transformers.masking_utils, or no attention_mask"
        )
    for name in ("position_bias", "alibi"):
        if kwargs.get(name) is not None:
            raise ValueError(f"{what} adds a {name} that is made from a part of the sequence: it cannot be divided")
