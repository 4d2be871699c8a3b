"""The exchange of attention: part of the tokens and all heads <-> all tokens and part of the heads.

``exchange`` cuts each tensor along one dimension, sends the pieces to the processes of the sequence axis, and joins
what comes along another. Several tensors (q, k and v) travel in one all-to-all. Its gradient is the exchange back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_hf.engine.comm.collectives import all_to_all
from ds_hf.engine.comm.mesh import Axis
from ds_hf.engine.comm.peer_exchanges import PeerExchanges, exchanges_for, laid_as

__all__ = ["Exchange", "exchange"]


@dataclass(frozen=True)
class Exchange:
    """How one tensor is cut and joined.

    Attributes:
        cut, join: the dimension that is cut, and the one along which pieces are joined.
        cut_sizes: what each process gets of ``cut``; ``None`` for equal pieces ...
        join_sizes: ... and what each has of ``join``; ``None``: as much as this one.
    """

    cut: int
    join: int
    cut_sizes: tuple[int, ...] | None = None
    join_sizes: tuple[int, ...] | None = None

    @property
    def back(self) -> Exchange:
        """The opposite: what it takes is what this one gives."""
        return Exchange(self.join, self.cut, self.join_sizes, self.cut_sizes)

    def equal(self) -> bool:
        """All pieces have one shape."""
        return self.cut_sizes is None and self.join_sizes is None


def exchange(tensors: Sequence[Tensor], ways: Exchange | Sequence[Exchange], axis: Axis, what: str) -> list[Tensor]:
    """Each tensor with its dimension ``cut`` divided over the axis and its dimension ``join`` whole; differentiable.

    Args:
        tensors: of one dtype and device; process ``r`` of the axis gets the ``r``-th piece of each.
        ways: for each tensor, or one for all.
        what: whose values they are, for the log of the axis.

    Raises:
        ValueError: a dimension does not divide.
    """
    each = [ways] * len(tensors) if isinstance(ways, Exchange) else list(ways)
    for tensor, way in zip(tensors, each, strict=True):
        size = tensor.shape[way.cut]
        if size % axis.world_size if way.cut_sizes is None else size != sum(way.cut_sizes):
            parts = axis.world_size if way.cut_sizes is None else way.cut_sizes
            raise ValueError(f"dimension {way.cut} of {what}, {list(tensor.shape)}, does not divide into {parts}")
    if axis.world_size == 1:
        return list(tensors)
    return list(_Exchange.apply(axis, what, tuple(each), *tensors))  # type: ignore[no-untyped-call]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: Axis, what: str, ways: tuple[Exchange, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.axis, ctx.what = axis, what
        ctx.ways = tuple(way.back for way in ways)
        return tuple(_run(tensors, ways, axis, what))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, None, *exchange(grads, ctx.ways, ctx.axis, f"gradient of {ctx.what}")


def _run(tensors: Sequence[Tensor], ways: Sequence[Exchange], axis: Axis, what: str) -> list[Tensor]:
    if not all(way.equal() for way in ways):
        return _run_uneven(tensors, ways, axis, what)
    nbytes = sum(tensor.nbytes for tensor in tensors) // axis.world_size * (axis.world_size - 1)
    copies = exchanges_for(axis, tensors[0], nbytes)
    return _run_equal(tensors, ways, axis, what) if copies is None else _run_copies(tensors, ways, copies, what)


def _run_copies(tensors: Sequence[Tensor], ways: Sequence[Exchange], copies: PeerExchanges, what: str) -> list[Tensor]:
    """From the tensors into the results, which have the dimensions in memory in the order of the tensors'."""
    n = copies.axis.world_size
    sources, targets, results = [], [], []
    for tensor, way in zip(tensors, ways, strict=True):
        sources.append(torch.unflatten(tensor, way.cut, (n, -1)).movedim(way.cut, 0))  # [n, *piece]
        shape = list(sources[-1].shape[1:])
        shape[way.join] *= n
        results.append(laid_as(tensor, shape))
        targets.append(torch.unflatten(results[-1], way.join, (n, -1)).movedim(way.join, 0))
    copies.exchange(sources, targets, what)
    return results


def _run_equal(tensors: Sequence[Tensor], ways: Sequence[Exchange], axis: Axis, what: str) -> list[Tensor]:
    """One copy per tensor into the buffer that travels, and one out of it."""
    n = axis.world_size
    lengths = [tensor.numel() // n for tensor in tensors]
    sent = tensors[0].new_empty((n, sum(lengths)))
    pieces, start = [], 0
    for tensor, way, length in zip(tensors, ways, lengths, strict=True):
        cut = torch.unflatten(tensor, way.cut, (n, -1)).movedim(way.cut, 0)  # [n, *piece]
        sent[:, start : start + length].view(cut.shape).copy_(cut)
        pieces.append((cut.shape, start, length))
        start += length
    received = torch.empty_like(sent)
    all_to_all(received, sent, axis, what)
    results = []
    for (shape, start, length), way in zip(pieces, ways, strict=True):
        came = received[:, start : start + length].view(shape)
        results.append(came.movedim(0, way.join).flatten(way.join, way.join + 1).contiguous())
    return results


def _run_uneven(tensors: Sequence[Tensor], ways: Sequence[Exchange], axis: Axis, what: str) -> list[Tensor]:
    """Pieces of different shapes: the buffer holds, for each process, what it gets of every tensor."""
    n, me = axis.world_size, axis.rank
    cuts = [
        torch.split(tensor, _sizes(way.cut_sizes, tensor.shape[way.cut], n), way.cut)
        for tensor, way in _zip(tensors, ways)
    ]
    sent = torch.cat([piece.reshape(-1) for rank in range(n) for piece in (cut[rank] for cut in cuts)])
    shapes = []  # of what each process sends here
    for rank in range(n):
        for (tensor, way), cut in zip(_zip(tensors, ways), cuts, strict=True):
            shape = list(cut[me].shape)
            shape[way.join] = tensor.shape[way.join] if way.join_sizes is None else way.join_sizes[rank]
            shapes.append(shape)
    k = len(tensors)
    received_sizes = [sum(map(math.prod, shapes[rank * k : (rank + 1) * k])) for rank in range(n)]
    sent_sizes = [sum(cut[rank].numel() for cut in cuts) for rank in range(n)]
    received = sent.new_empty(sum(received_sizes))
    all_to_all(received, sent, axis, what, received_sizes, sent_sizes)
    flat = torch.split(received, [math.prod(shape) for shape in shapes])
    came = [values.view(shape) for values, shape in zip(flat, shapes, strict=True)]
    return [torch.cat(came[index::k], way.join) for index, way in enumerate(ways)]


def _zip(tensors: Sequence[Tensor], ways: Sequence[Exchange]) -> list[tuple[Tensor, Exchange]]:
    return list(zip(tensors, ways, strict=True))


def _sizes(given: tuple[int, ...] | None, size: int, n: int) -> list[int]:
    return [size // n] * n if given is None else list(given)
