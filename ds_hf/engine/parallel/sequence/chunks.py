"""The exchange of attention in chunks of heads: while one chunk attends, the other one travels.

By copies between the GPUs of one host (``comm/peer_exchanges.py``), which take no multiprocessor from the computation.
What ``exchange.py`` does in one function of autograd is a start and an end here, and each of them has the other's
opposite as its gradient:

=================  ======================================  ====================
function           forward                                 backward
=================  ======================================  ====================
``_SpreadStart``   all chunks of heads set out             all chunks are in
``_SpreadEnd``     one chunk of heads is in                one chunk sets out
``_CollectStart``  one chunk of a context sets out         one chunk is in
``_CollectEnd``    all chunks are in                       all chunks set out
=================  ======================================  ====================

Autograd runs what was done last first, so backward has the same overlap: the chunks' order is turned round. Between a
start and its end a tensor of the right shape stands for what is on its way, and nothing reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ds_hf.engine.comm.peer_exchanges import PeerExchanges, Started, laid_as

__all__ = ["ChunkedHeads"]


class ChunkedHeads:
    """Heads of several tensors for tokens, in chunks: of one call of attention, and for one of the two ways.

    *Whole* tensors have this process's tokens and all heads, *chunks* have all tokens and some of the heads that this
    process computes. Process ``r`` computes the ``r``-th part of the heads, and each part is cut into chunks.

    Args:
        heads, tokens: dimensions of the tensors.
        count: of chunks.
        what: whose values they are, for the log of the axis.
    """

    def __init__(self, copies: PeerExchanges, heads: int, tokens: int, count: int, what: str) -> None:
        self._copies, self._heads, self._tokens, self.count, self._what = copies, heads, tokens, count, what
        self._under_way: dict[int, tuple[Started, list[Tensor]]] = {}
        self._wholes: list[Tensor] | None = None  # that chunks are collected into

    def spread(self, wholes: Sequence[Tensor]) -> list[list[Tensor]]:
        """All chunks set out; for ``arrived``. Collective, as is what follows, and each one's backward."""
        found = _SpreadStart.apply(self, *wholes)  # type: ignore[no-untyped-call]
        return [list(found[chunk :: self.count]) for chunk in range(self.count)]

    def arrived(self, chunk: int, coming: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of a chunk, ``[..., heads / processes / chunks, tokens * processes, ...]``."""
        return list(_SpreadEnd.apply(self, chunk, *coming))  # type: ignore[no-untyped-call]

    def send(self, chunk: int, context: Tensor) -> Tensor:
        """A chunk sets out to those whose tokens it has; for ``collected``."""
        return cast(Tensor, _CollectStart.apply(self, chunk, context))  # type: ignore[no-untyped-call]

    def collected(self, leaving: Sequence[Tensor]) -> Tensor:
        """All heads of this process's tokens."""
        return cast(Tensor, _CollectEnd.apply(self, *leaving))  # type: ignore[no-untyped-call]

    # What the functions do.

    def spread_start(self, wholes: Sequence[Tensor], chunks: Sequence[int]) -> None:
        n = self._copies.axis.world_size
        for chunk in chunks:
            sources = [self._of_chunk(whole, chunk) for whole in wholes]
            results = [laid_as(whole, self.shape_of_chunk(whole)) for whole in wholes]
            targets = [torch.unflatten(each, self._tokens, (n, -1)).movedim(self._tokens, 0) for each in results]
            self._under_way[chunk] = self._copies.start(sources, targets, self._what), results

    def spread_end(self, chunk: int) -> list[Tensor]:
        started, results = self._under_way.pop(chunk)
        self._copies.finish(started)
        return results

    def collect_start(self, tensors: Sequence[Tensor], chunk: int) -> None:
        n = self._copies.axis.world_size
        if self._wholes is None:
            self._wholes = [laid_as(tensor, self.shape_of_whole(tensor)) for tensor in tensors]
        sources = [torch.unflatten(each, self._tokens, (n, -1)).movedim(self._tokens, 0) for each in tensors]
        targets = [self._of_chunk(whole, chunk) for whole in self._wholes]
        self._under_way[chunk] = self._copies.start(sources, targets, self._what), []

    def collect_end(self) -> list[Tensor]:
        for chunk in list(self._under_way):
            self._copies.finish(self._under_way.pop(chunk)[0])
        wholes, self._wholes = self._wholes, None
        assert wholes is not None
        return wholes

    def shape_of_chunk(self, whole: Tensor) -> list[int]:
        n, shape = self._copies.axis.world_size, list(whole.shape)
        shape[self._heads] //= n * self.count
        shape[self._tokens] *= n
        return shape

    def shape_of_whole(self, chunk: Tensor) -> list[int]:
        n, shape = self._copies.axis.world_size, list(chunk.shape)
        shape[self._heads] *= n * self.count
        shape[self._tokens] //= n
        return shape

    def _of_chunk(self, whole: Tensor, chunk: int) -> Tensor:
        """``[n, *piece]``: the heads of a chunk of each process."""
        heads = self._heads
        parts = torch.unflatten(whole, heads, (self._copies.axis.world_size, self.count, -1))
        return parts.select(heads + 1, chunk).movedim(heads, 0)


class _SpreadStart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: ChunkedHeads, *wholes: Tensor) -> tuple[Tensor, ...]:
        ctx.heads = heads
        heads.spread_start(wholes, range(heads.count))
        return tuple(
            whole.new_empty(()).expand(heads.shape_of_chunk(whole)) for whole in wholes for _ in range(heads.count)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, *ctx.heads.collect_end()


class _SpreadEnd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: ChunkedHeads, chunk: int, *coming: Tensor) -> tuple[Tensor, ...]:
        ctx.heads, ctx.chunk = heads, chunk
        return tuple(heads.spread_end(chunk))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ctx.heads.collect_start(grads, ctx.chunk)
        return None, None, *grads


class _CollectStart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: ChunkedHeads, chunk: int, context: Tensor) -> Tensor:
        ctx.heads, ctx.chunk = heads, chunk
        heads.collect_start([context], chunk)
        return context.new_empty(()).expand(heads.shape_of_whole(context))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.heads.spread_end(ctx.chunk)


class _CollectEnd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: ChunkedHeads, *leaving: Tensor) -> Tensor:
        ctx.heads, ctx.count = heads, len(leaving)
        (whole,) = heads.collect_end()
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        ctx.heads.spread_start([grad], range(ctx.heads.count)[::-1])
        return None, *(grad.new_empty(()).expand_as(grad) for _ in range(ctx.count))
