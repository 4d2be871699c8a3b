"""Sums of gradients by copies between the GPUs of one host, see ``peers``.

Against NCCL's reduce-scatter: the GPUs' copy engines move the bytes, so that multiprocessors are taken from backward
only for adding up, and sums are taken in fp32 and rounded once, whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ds_hf.engine.dist.mesh import Axis
from ds_hf.engine.ops import library as ops

__all__ = ["PeerSums"]

_ALIGNMENT = 512  # bytes: where vectors of any dtype may begin


class PeerSums:
    """Sums of all ranks' gradients, each rank's share by itself: parts are copied to who adds them up.

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
        rank, world_size = axis.rank, axis.world_size
        self._others = [(rank + step) % world_size for step in range(1, world_size)]  # each begins with another
        self._row_nbytes = max(slot_nbytes // len(self._others) // _ALIGNMENT, 1) * _ALIGNMENT
        memory = mapping(2 * len(self._others) * self._row_nbytes, torch.uint8)
        slots = [each.view(2, len(self._others), self._row_nbytes) for each in memory]
        # What rank p sends to rank r lies there in row p - r - 1, modulo the number of ranks.
        self._there = [{o: slots[o][turn][(rank - o - 1) % world_size] for o in self._others} for turn in range(2)]
        self._here = [{o: slots[rank][turn][(o - rank - 1) % world_size] for o in self._others} for turn in range(2)]
        self._turn = 0

    def reduce_scatter(self, full: Tensor, factor: float, what: str) -> Tensor:
        """This rank's part, ``[numel / world_size]``, of ``factor`` times the sum; added up in fp32 in the order of the
        ranks. Collective, always on the same stream.

        Args:
            full: ``[numel]``, contiguous; to be kept until the stream has read it.
        """
        axis = self._axis
        parts = full.view(axis.world_size, -1)
        result = torch.empty_like(parts[axis.rank])
        step = self._row_nbytes // full.itemsize
        with axis.log("reduce-scatter", what, full):
            for begin in range(0, len(result), step):
                pieces = [part[begin : begin + step] for part in parts]
                there, here = self._there[self._turn], self._here[self._turn]
                self._turn = 1 - self._turn
                for other in self._others:
                    piece = pieces[other]
                    there[other][: piece.nbytes].view(full.dtype).copy_(piece, non_blocking=True)
                    pieces[other] = here[other][: piece.nbytes].view(full.dtype)
                self._meet()
                ops.scaled_sum_([result[begin : begin + step], *pieces], factor=factor)
        return result
