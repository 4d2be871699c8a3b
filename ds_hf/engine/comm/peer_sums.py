"""Sums of gradients by copies between the GPUs of one host, see ``peers``.

Against NCCL's reduce-scatter: the GPUs' copy engines move the bytes, from where backward left them, so that
multiprocessors are taken from it only for adding up. Sums are taken in fp32 and rounded once, if at all, whatever the
number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ds_hf.engine.comm.mesh import Axis
from ds_hf.engine.ops import library as ops

__all__ = ["PeerSums", "Runs"]

Runs = tuple[tuple[int, int], ...]  # in order: first element, and the one after the last, of what is no gap

_ALIGNMENT = 512  # bytes: where vectors of any dtype may begin


class _Push(NamedTuple):
    """Elements of one run that go to one rank in one round."""

    rank: int
    run: int
    begin: int  # in the run
    end: int
    at: int  # in the row


class _Route(NamedTuple):
    """What is done with runs: for each round what is pushed, and what is added up here."""

    gaps: tuple[tuple[int, int], ...]  # in the shard
    pushes: tuple[tuple[_Push, ...], ...]
    cuts: tuple[tuple[int, ...], ...]  # as ``ops.sum_parts_`` takes them


class PeerSums:
    """Sums of all ranks' gradients, each rank's shard by itself: parts are copied to who adds them up.

    A rank has two slots that take turns, with a row for each other rank. In the order of the stream: all ranks push
    their parts into the slot, meet, and add up what came. So when a slot's turn comes again, a meeting lies between
    and its last sum.

    Args:
        mapping: as ``Peers`` has it.
        meet: collective; what the current streams of all ranks were given before comes before what they get next.
        slot_nbytes: of gradients that come in at once.
    """

    def __init__(
        self,
        axis: Axis,
        mapping: Callable[[int, torch.dtype], Sequence[Tensor]],
        meet: Callable[[], None],
        slot_nbytes: int = 16 << 20,
    ) -> None:
        self._axis, self._meet = axis, meet
        others = axis.world_size - 1
        self._row_nbytes = max(slot_nbytes // others // _ALIGNMENT, 1) * _ALIGNMENT
        self._slots = [each.view(2, others, -1) for each in mapping(2 * others * self._row_nbytes, torch.uint8)]
        self._views: dict[tuple[int, int, torch.dtype, int], Sequence[tuple[_Push, Tensor]]] = {}
        self._routes: list[_Route] = []
        self._turn = 0

    def reduce_scatter(
        self,
        tensors: Sequence[Tensor],
        runs: Runs,
        numel: int,
        *,
        factor: float,
        what: str,
        before: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """This rank's shard of ``factor`` times the sum over the ranks. Collective, always on the same stream.

        Args:
            tensors: of each run, contiguous and of one dtype; to be kept until the stream has read them.
            runs: where they belong in the flat gradient, whose gaps are zero. All ranks' have the same gaps.
            numel: of the flat gradient.
            before: ``[numel / world_size]``, to which the sum is added; in place, if it is of ``dtype``.
            dtype: of the result, by default that of ``tensors``.

        Returns:
            ``[numel / world_size]``.
        """
        axis, given, length = self._axis, tensors[0].dtype, numel // self._axis.world_size
        step = self._row_nbytes // given.itemsize
        route = _route(runs, axis.rank, axis.world_size, length, step)
        result = before
        if result is None or result.dtype != (dtype or given):
            result = torch.empty(length, dtype=dtype or given, device=tensors[0].device)
            for begin, end in route.gaps:
                result[begin:end].zero_()
        with axis.log("reduce-scatter", what, result):
            for number, cuts in enumerate(route.cuts):
                turn, self._turn = self._turn, 1 - self._turn
                for (_, run, begin, end, _), there in self._targets(route, number, given, turn):
                    part = tensors[run].view(-1)
                    there.copy_(part if end - begin == part.numel() else part[begin:end], non_blocking=True)
                self._meet()
                rows = self._slots[axis.rank][turn].view(given)
                ops.sum_parts_(result, tensors, before, rows, cuts=cuts, place=axis.rank, factor=factor)
        return result

    def _targets(self, route: _Route, number: int, dtype: torch.dtype, turn: int) -> Sequence[tuple[_Push, Tensor]]:
        """What is pushed in a round, and where; kept, for each view costs the host as much as half a launch."""
        found = self._views.get((id(route), number, dtype, turn))
        if found is None:
            rank, ranks = self._axis.rank, self._axis.world_size
            rows = [slots[turn].view(dtype) for slots in self._slots]
            # What rank p sends to rank r lies there in row p - r - 1, modulo the number of ranks.
            found = [
                (push, rows[push.rank][(rank - push.rank - 1) % ranks, push.at : push.at + push.end - push.begin])
                for push in route.pushes[number]
            ]
            self._views[id(route), number, dtype, turn] = found
            self._routes.append(route)  # as long as its id stands for it
        return found


@lru_cache(maxsize=4096)
def _route(runs: Runs, rank: int, ranks: int, length: int, step: int) -> _Route:
    """The way of ``runs`` in rounds of ``step`` elements of each shard of ``length``."""

    def part(owner: int, low: int, high: int) -> Iterator[_Push]:
        for run, (begin, end) in enumerate(runs):
            first, last = max(begin, low), min(end, high)
            if first < last:
                yield _Push(owner, run, first - begin, last - begin, first - low)

    pushes, sums = [], []
    for low in range(0, length, step):
        high = min(low + step, length)
        others = [(rank + turn) % ranks for turn in range(1, ranks)]  # each rank begins with another
        pushes.append(tuple(push for o in others for push in part(o, o * length + low, o * length + high)))
        mine = part(rank, rank * length + low, rank * length + high)
        cuts = [(run, begin, low + at, at, end - begin) for _, run, begin, end, at in mine]
        sums.append(tuple(number for cut in cuts for number in cut))
    ends = [rank * length, *(end for _, end in runs)]
    begins = [*(begin for begin, _ in runs), (rank + 1) * length]
    inside = [
        (max(end, rank * length) - rank * length, min(begin, (rank + 1) * length) - rank * length)
        for end, begin in zip(ends, begins, strict=True)
    ]
    return _Route(tuple((begin, end) for begin, end in inside if begin < end), tuple(pushes), tuple(sums))
