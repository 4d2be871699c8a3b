"""How tokens get to the processes that have their experts, and back: the functions of tensors that move them.

Words: a *route* is a token and one of its experts; a *row* is a token and a process that has at least one of its
experts. A token travels as one row for each such process, not for each expert: with 8 of 128 experts over 8 processes
5.3 rows on the average in place of 8 (1 - (7/8)^8 of the processes have one), and the process at the other end adds up
what its experts give before it sends a row back. Both are grouped by ``ops/routes.py``.

What a process has for itself does not travel: everywhere it comes last, after what is of the others in their order.

Every sum over rows or routes is taken in the order of their numbers, so results do not depend on the order in which
threads come (as ``index_add_`` on a GPU does). All shapes are flat: ``[tokens, width]``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ds_hf.engine.comm import collectives
from ds_hf.engine.comm.mesh import Axis
from ds_hf.engine.ops import routes, rows
from ds_hf.engine.ops.routes import Groups

__all__ = ["Splits", "add_up", "exchange", "exchange_counts", "label", "outside_graphs", "pick", "take"]


class Splits(NamedTuple):
    """How many rows go to each process and come from it, and of how many routes the latter are."""

    sent: list[int]
    received: list[int]
    routes: int


def outside_graphs(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``function`` as compiled blocks are to call it; a decorator would load torch's compiler in every process."""
    eagerly: Callable[..., Any] = torch.compiler.disable
    return eagerly(function) if torch.compiler.is_compiling() else function


# -- functions of tensors ------------------------------------------------------------------------------------------


def take(x: Tensor, items: Groups) -> Tensor:
    """``x[items.place]``; its gradient is the sum over the items of each place."""
    return cast(Tensor, _Take.apply(x, items.place, items.by_place, items.starts))  # type: ignore[no-untyped-call]


def add_up(x: Tensor, items: Groups) -> Tensor:
    """The sum of the items of each place, ``[places, width]``, taken in fp32 at least."""
    return cast(Tensor, _AddUp.apply(x, items.place, items.by_place, items.starts))  # type: ignore[no-untyped-call]


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *items: Tensor) -> Tensor:
        ctx.save_for_backward(*items)
        return x.index_select(0, items[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _AddUp.apply(grad, *ctx.saved_tensors), None, None, None  # type: ignore[no-untyped-call]


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, place: Tensor, by_place: Tensor, starts: Tensor) -> Tensor:
        ctx.save_for_backward(place, by_place, starts)
        return rows.add_up(x.contiguous(), by_place, starts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _Take.apply(grad, *ctx.saved_tensors), None, None, None  # type: ignore[no-untyped-call]


def label(values: Tensor, experts: Tensor, rows_of: Groups, count: int, rank: int) -> Tensor:
    """``routes.label``; its gradient is that of ``values``."""
    way = experts, rows_of.order, rows_of.number, count, rank, len(rows_of.totals)
    return cast(Tensor, _Label.apply(values, *way))  # type: ignore[no-untyped-call]


def pick(values: Tensor, items: Groups, each: int, offset: int = 0) -> Tensor:
    """``routes.pick``; its gradient is that of ``values``."""
    return cast(Tensor, _Pick.apply(values, items.order, items.number, each, offset))  # type: ignore[no-untyped-call]


class _Label(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, experts: Tensor, order: Tensor, number: Tensor, *way: int) -> Tensor:
        ctx.save_for_backward(experts, number)
        ctx.way = way
        return routes.label(values.contiguous(), experts.contiguous(), order, *way)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        experts, number = ctx.saved_tensors
        found = routes.unlabel(grad.contiguous(), experts.contiguous(), number, *ctx.way)
        return found, None, None, None, None, None, None


class _Pick(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, order: Tensor, number: Tensor, each: int, offset: int) -> Tensor:
        ctx.save_for_backward(number)
        ctx.way = each, offset, values.shape[1]
        return routes.pick(values.contiguous(), order, each, offset)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return routes.unpick(grad.contiguous(), *ctx.saved_tensors, *ctx.way), None, None, None, None


# -- between processes ---------------------------------------------------------------------------------------------


def exchange_counts(counts: Tensor, axis: Axis, what: str) -> Splits:
    """Tell every process of ``axis`` how many rows and routes it gets, int64 ``[processes, 2]`` by their ranks.
    Collective.

    The host waits here for the device, once: the sizes of what follows depend on it.
    """
    received = torch.empty_like(counts)
    collectives.all_to_all(received, counts, axis, f"numbers of tokens of {what}")
    told = torch.stack([counts, received]).tolist()
    (sent, got) = ([int(number) for number, _ in each] for each in told)
    return Splits(sent, got, sum(int(routes) for _, routes in told[1]))


def even_splits(tokens: int, k: int, size: int) -> Splits:
    """What is to be expected of experts that are chosen equally often, for tensors without values (meta)."""
    each = [round(tokens * (1 - (1 - 1 / size) ** k))] * size
    return Splits(each, each, tokens * k)


def exchange(x: Tensor, axis: Axis, received: list[int], sent: list[int], what: str) -> Tensor:
    """Rows to every process of ``axis`` and from it; the gradient goes back the same way. Collective, as is backward.

    Args:
        x: ``[sum(sent), width]``, those for each process together, and this one's own last.
        received, sent: numbers of rows by rank.

    Returns:
        ``[sum(received), width]``, in the same order.
    """
    return cast(Tensor, _Exchange.apply(x, axis, received, sent, what))  # type: ignore[no-untyped-call]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, received: list[int], sent: list[int], what: str) -> Tensor:
        ctx.way = axis, sent, received, f"gradients of {what}"
        result = x.new_empty(sum(received), *x.shape[1:])
        if x.is_meta:
            return result
        me, x = axis.rank, x.contiguous()
        own, there = sent[me], result.shape[0] - received[me]
        to, fro = ([*sizes[:me], 0, *sizes[me + 1 :]] for sizes in (received, sent))
        mine, kept = result[there:], x[len(x) - own :]
        collectives.all_to_all(result[:there], x[: len(x) - own], axis, what, to, fro, beside=lambda: mine.copy_(kept))
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        axis, received, sent, what = ctx.way
        return exchange(grad, axis, received, sent, what), None, None, None, None
