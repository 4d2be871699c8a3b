"""How tokens get to the processes that have their experts, and back: rows, and the functions of tensors that move them.

Words: a *route* is a token and one of its experts; a *row* is a token and a process that has at least one of its
experts. A token travels as one row for each such process, not for each expert: with 8 of 128 experts over 8 processes
5.3 rows on the average in place of 8 (1 - (7/8)^8 of the processes have one), and the process at the other end adds up
what its experts give before it sends a row back.

What a process has for itself does not travel: everywhere it comes last, after what is of the others in their order.

Every sum over rows or routes is taken in the order of their numbers, so results do not depend on the order in which
threads come (as ``index_add_`` on a GPU does). All shapes are flat: ``[tokens, width]``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ds_hf.engine.comm import collectives
from ds_hf.engine.comm.mesh import Axis
from ds_hf.engine.ops import rows

__all__ = [
    "Items",
    "Splits",
    "add_up",
    "all_routes",
    "exchange",
    "exchange_counts",
    "outside_graphs",
    "routes_here",
    "rows_of",
    "take",
]


class Items(NamedTuple):
    """Copies of places: rows of tokens, or routes of rows.

    Attributes:
        place: int64 ``[n]``: of which place each item is.
        by_place: int64 ``[n]``: the items in the order of their places ...
        starts: ... and where those of each place begin there, int64 ``[places]``.
    """

    place: Tensor
    by_place: Tensor
    starts: Tensor


class Splits(NamedTuple):
    """How many rows go to each process and come from it, and of how many routes the latter are."""

    sent: list[int]
    received: list[int]
    routes: int


def places_of(owner: Tensor, me: int, size: int) -> Tensor:
    """For process ``me`` the places of the processes ``owner``, with its own the last; ``size`` stays what it is."""
    others = owner - (owner > me).long()
    return others.masked_fill(owner == me, size - 1).masked_fill(owner == size, size)


def rows_of(owner: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Which processes each token goes to, and how much each gets. Nothing waits for the device.

    Args:
        owner: int64 ``[tokens, k]``: the place (``places_of``) of the process that has the expert of a route; ``size``
            where there is none.

    Returns:
        bool ``[tokens, size]``; int64 ``[size, 2]``: rows and routes for each process; int64 ``[size * tokens]``: the
        places of ``goes.T`` that are set, first, in their order.
    """
    tokens = owner.shape[0]
    routes = owner.new_zeros(tokens, size + 1).scatter_add_(1, owner, torch.ones_like(owner))[:, :size]
    goes = routes > 0
    counts = torch.stack([goes.sum(0), routes.sum(0)], 1)
    return goes, counts, _set_first(goes.T.reshape(-1))


def sent_items(goes: Tensor, order: Tensor, count: int) -> Items:
    """The ``count`` rows of ``rows_of`` as items of tokens, grouped by the process that they go to."""
    tokens = goes.shape[0]
    number = (goes.T.reshape(-1).cumsum(0) - 1).view(goes.shape[1], tokens).T.reshape(-1)  # of the row, by token
    by_token = _set_first(goes.reshape(-1))[:count]
    return Items(order[:count] % max(tokens, 1), number[by_token], _starts(goes.sum(1)))


def routes_here(experts: Tensor, count: int, routes: int) -> tuple[Items, Tensor, Tensor]:
    """The routes of received rows, sorted by their expert.

    Args:
        experts: int64 ``[rows, k]``: which of this process's ``count`` experts, ``count`` for none of them.
        routes: how many there are.

    Returns:
        the routes as items of rows; int64 ``[routes]``: their experts; int64 ``[routes]``: their places in
        ``experts.view(-1)``.
    """
    flat = experts.reshape(-1)
    found, order = torch.sort(flat, stable=True)
    order, k = order[:routes], experts.shape[1]
    number = torch.empty_like(flat)
    number[order] = torch.arange(routes, device=flat.device)
    here = flat < count
    items = Items(order // k, number[_set_first(here)[:routes]], _starts(here.view(-1, k).sum(1)))
    return items, found[:routes], order


def all_routes(experts: Tensor) -> tuple[Items, Tensor, Tensor]:
    """As ``routes_here``, of tokens all of whose experts are here: int64 ``[tokens, k]``."""
    found, order = torch.sort(experts.reshape(-1), stable=True)
    tokens, k = experts.shape
    number = torch.empty_like(order)
    number[order] = torch.arange(len(order), device=order.device)
    return Items(order // k, number, torch.arange(0, tokens * k, k, device=order.device)), found, order


def _set_first(chosen: Tensor) -> Tensor:
    """Numbers of the places that are set, in their order; after them the others."""
    return torch.argsort(~chosen, stable=True)


def _starts(numbers: Tensor) -> Tensor:
    return numbers.cumsum(0) - numbers


def outside_graphs(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``function`` as compiled blocks are to call it; a decorator would load torch's compiler in every process."""
    eagerly: Callable[..., Any] = torch.compiler.disable
    return eagerly(function) if torch.compiler.is_compiling() else function


# -- functions of tensors ------------------------------------------------------------------------------------------


def take(x: Tensor, items: Items) -> Tensor:
    """``x[items.place]``; its gradient is the sum over the items of each place."""
    return cast(Tensor, _Take.apply(x, *items))  # type: ignore[no-untyped-call]


def add_up(x: Tensor, items: Items) -> Tensor:
    """The sum of the items of each place, ``[places, width]``, taken in fp32 at least."""
    return cast(Tensor, _AddUp.apply(x, *items))  # type: ignore[no-untyped-call]


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *items: Tensor) -> Tensor:
        ctx.save_for_backward(*items)
        return x.index_select(0, items[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return add_up(grad, Items(*ctx.saved_tensors)), None, None, None


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, place: Tensor, by_place: Tensor, starts: Tensor) -> Tensor:
        ctx.save_for_backward(place, by_place, starts)
        return rows.add_up(x.contiguous(), by_place, starts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return take(grad, Items(*ctx.saved_tensors)), None, None, None


# -- between processes ---------------------------------------------------------------------------------------------


def exchange_counts(counts: Tensor, axis: Axis, what: str) -> Splits:
    """Tell every process of ``axis`` how many rows and routes it gets, int64 ``[processes, 2]`` by their places.
    Collective.

    The host waits here for the device, once: the sizes of what follows depend on it.
    """
    counts = torch.cat([counts[: axis.rank], counts[-1:], counts[axis.rank : -1]])  # by their ranks
    received = torch.empty_like(counts)
    collectives.all_to_all(received, counts.contiguous(), axis, f"numbers of tokens of {what}")
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
        collectives.all_to_all(result[:there], x[: len(x) - own], axis, what, to, fro)
        result[there:].copy_(x[len(x) - own :])
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        axis, received, sent, what = ctx.way
        return exchange(grad, axis, received, sent, what), None, None, None, None
