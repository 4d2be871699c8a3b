"""Which heads of attention each process of a sequence computes.

Query heads are divided equally. Key and value heads are divided too; where there are too few of them (grouped-query
attention), each is sent to several processes, so that every query head finds its own: ``repeats``.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ds_hf.engine.comm.mesh import Axis
from ds_hf.engine.parallel.sequence.exchange import Exchange, exchange

__all__ = ["HeadPlan", "gather_tokens", "plan_heads", "scatter_tokens", "shares_of"]


@dataclass(frozen=True)
class HeadPlan:
    """Of one attention layer.

    Attributes:
        repeats: how often each key and value head is sent.
        groups: query heads for each key and value head, on every process.
    """

    repeats: int
    groups: int


def plan_heads(query_heads: int, kv_heads: int, processes: int) -> HeadPlan:
    """Heads of one of ``processes``.

    Raises:
        ValueError: the query heads do not divide; the message names the sizes that do.
    """
    if query_heads % processes:
        sizes = [size for size in range(1, query_heads + 1) if query_heads % size == 0]
        raise ValueError(
            f"Attention head count {query_heads} is not divisible by SP size {processes}: each process computes "
            f"equally many heads, so sp_size has to be one of {', '.join(map(str, sizes))}"
        )
    groups = query_heads // kv_heads
    repeats = next(times for times in range(1, groups + 1) if groups % times == 0 and kv_heads * times % processes == 0)
    return HeadPlan(repeats, groups // repeats)


def gather_tokens(
    query: Tensor, key: Tensor, value: Tensor, axis: Axis, what: str
) -> tuple[Tensor, Tensor, Tensor, int]:
    """All tokens of a part of the heads, in one all-to-all.

    Args:
        query: ``[batch, heads, tokens, dim]``; key, value: ``[batch, kv_heads, tokens, dim]``, with tokens of this
            process.

    Returns:
        the same with ``heads / n`` and ``tokens * n`` for ``n`` processes, and the number of query heads for each key
        head.

    Raises:
        ValueError: heads do not divide.
    """
    plan = plan_heads(query.shape[1], key.shape[1], axis.world_size)
    if plan.repeats > 1:
        key, value = (each.repeat_interleave(plan.repeats, 1) for each in (key, value))
    query, key, value = exchange((query, key, value), Exchange(cut=1, join=2), axis, f"heads of {what}")
    return query, key, value, plan.groups


def scatter_tokens(context: Tensor, axis: Axis, what: str) -> Tensor:
    """``[batch, tokens * n, heads / n, dim]`` -> ``[batch, tokens, heads, dim]``: the way back of what attention
    gives."""
    (result,) = exchange((context,), Exchange(cut=1, join=2), axis, f"context of {what}")
    return result


def shares_of(heads: int, kv_heads: int, processes: int) -> tuple[int, ...]:
    """Uneven shares of ``heads`` that keep the groups of ``kv_heads`` together: the first processes have one more.

    Raises:
        ValueError: there are fewer groups than processes, or heads that do not form groups.
    """
    if kv_heads < processes or heads % kv_heads:
        raise ValueError(
            f"Number of key-value heads ({kv_heads}) must be at least the sequence parallel size ({processes}), and "
            f"divide the {heads} heads: a smaller count leaves a process with no head to attend over"
        )
    whole, rest = divmod(kv_heads, processes)
    return tuple((whole + (rank < rest)) * (heads // kv_heads) for rank in range(processes))
