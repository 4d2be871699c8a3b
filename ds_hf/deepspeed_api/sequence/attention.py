"""Attention of transformers over divided sequences: what stands in ``ALL_ATTENTION_FUNCTIONS`` in place of a core.

The entry of the core's own name is replaced, and not a name of our own made, because models ask for names such as
"flash_attention_2" in other places. It calls the core as it is for every model that is not bound to a
``SequenceDivision``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ds_hf.deepspeed_api.sequence.division import SequenceDivision, division_of
from ds_hf.engine.comm.peer_exchanges import PeerExchanges, exchanges_for
from ds_hf.engine.parallel.sequence.chunks import ChunkedHeads
from ds_hf.engine.parallel.sequence.heads import gather_tokens, scatter_tokens

__all__ = ["attend", "divided_attention", "replace_core"]

_CORE = "_ds_hf_core"
_CHUNKS = 2
_LEAST_TOKENS = 4096  # of a sequence: attention to fewer takes no longer than they travel


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
    if kwargs.get("s_aux") is not None:  # learned sinks, one for each head
        kwargs["s_aux"] = kwargs["s_aux"].unflatten(0, (axis.world_size, heads // axis.world_size))[axis.rank]
    whole = query.shape[2] * axis.world_size
    if (positions := kwargs.get("position_ids")) is not None and positions.shape[-1] != whole:
        kwargs["position_ids"] = division.whole(positions, "position_ids") if division.by_positions else None
    if (copies := _copies_for_chunks(division, query, key, value, attention_mask, kwargs)) is not None:
        compute = partial(core, module)
        return _attend_in_chunks(compute, copies, what, (query, key, value), attention_mask, *args, **kwargs)
    query, key, value, groups = gather_tokens(query, key, value, axis, what)
    with _groups(module, groups):
        context, *others = core(module, query, key, value, attention_mask, *args, **kwargs)
    if context.ndim == 3:
        context = context.unflatten(-1, (heads // axis.world_size, -1))
    return scatter_tokens(context, axis, what), *others


def _copies_for_chunks(
    division: SequenceDivision, query: Tensor, key: Tensor, value: Tensor, mask: Any, kwargs: dict[str, Any]
) -> PeerExchanges | None:
    """The copies by which chunks of heads travel; ``None`` where all heads attend at once.

    Chunks need a core that computes each head by itself and whose backward is not differentiated again, no dropout (it
    would draw other numbers), and heads that divide.
    """
    axis = division.axis
    n = axis.world_size
    nbytes = sum(each.nbytes for each in (query, key, value)) // n * (n - 1)
    copies = exchanges_for(axis, query, nbytes)
    if copies is None or not division.core.startswith(("sdpa", "flash_attention")):
        return None
    if any(each.shape[1] % (_CHUNKS * n) for each in (query, key)) or query.shape[2] * n < _LEAST_TOKENS:
        return None
    drops, by_heads = kwargs.get("dropout"), mask is not None and mask.ndim > 2 and mask.shape[1] > 1
    return None if drops or by_heads else copies


def _attend_in_chunks(
    compute: Callable[..., Any], copies: PeerExchanges, what: str, given: Sequence[Tensor], *args: Any, **kwargs: Any
) -> Any:
    """As ``attend``; ``given`` are query, key and value, and ``compute`` takes those of a chunk before ``args``."""
    there = ChunkedHeads(copies, heads=1, tokens=2, count=_CHUNKS, what=f"heads of {what}")
    back = ChunkedHeads(copies, heads=2, tokens=1, count=_CHUNKS, what=f"context of {what}")
    heads, sinks = given[0].shape[1] // copies.axis.world_size // _CHUNKS, kwargs.get("s_aux")
    leaving = []
    for chunk, coming in enumerate(there.spread(given)):
        if sinks is not None:
            kwargs["s_aux"] = sinks.unflatten(0, (_CHUNKS, -1))[chunk]
        context, *others = compute(*there.arrived(chunk, coming), *args, **kwargs)
        leaving.append(back.send(chunk, context.unflatten(-1, (heads, -1)) if context.ndim == 3 else context))
    return back.collected(leaving), *others


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
