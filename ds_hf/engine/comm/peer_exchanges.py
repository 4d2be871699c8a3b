"""What activations need of other processes, by copies between the GPUs of one host, see ``peers``: all-to-alls of pieces,
gathers, and sums that leave each process its part.

Against NCCL's collectives: a piece goes from where the model computed it, whatever its strides, straight into the
memory of the process that it is for, and from there to where that one reads it. NCCL wants pieces in one buffer and
gives another, which is two more passes over the memory, and its own copies reach half of NVLink's speed between two.

What comes lies in one of three slots that take turns. On the communication stream a rank pushes, and then meets the
others: what they pushed has come. The main stream waits for that, and takes it out of the slot. A stream that enters
waits for what the main stream was given before, so behind the second meeting after a push all ranks have taken what it
brought: with three slots the third push may write there again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_hf.engine.comm.mesh import Axis
from ds_hf.engine.comm.streams import Awaited, CommStream, wait

__all__ = ["LEAST_PUSHED_NBYTES", "PeerExchanges", "exchanges_for"]

# That a process sends in one exchange. Below, the host is what the GPUs wait for, and NCCL's one launch is faster.
LEAST_PUSHED_NBYTES = 8 << 20
_TURNS = 3
_WORD = torch.complex128  # 16 bytes, which a kernel copies at once


class PeerExchanges:
    """Of the ranks of ``axis``, which write into each other's memory. What one rank asks for all ask for, in one order.

    Args:
        mapping: as ``Peers`` has it.
        meet: collective; what the current streams of all ranks were given before comes before what they get next.
        stream: on which ranks push and meet, and nothing else.
    """

    def __init__(
        self,
        axis: Axis,
        mapping: Callable[[int, torch.dtype], Sequence[Tensor]],
        meet: Callable[[], None],
        stream: CommStream,
    ) -> None:
        self.axis, self._mapping, self._meet, self._stream = axis, mapping, meet, stream
        self._slots: Sequence[Tensor] = ()  # of each rank, [turns, other ranks, bytes]
        self._row_nbytes = 0
        self._turn = 0
        self._rows: dict[tuple[Any, ...], Tensor] = {}

    def exchange(self, sources: Sequence[Tensor], targets: Sequence[Tensor], what: str) -> None:
        """An all-to-all of several tensors. Collective.

        Args:
            sources: ``[ranks, *piece]`` of one dtype and any strides: what each rank is to get.
            targets: the same shapes: where what each rank has for this one is written.
            what: whose values they are, for the log of the axis.
        """
        rank = self.axis.rank
        total = sum(source.numel() for source in sources)
        with self.axis.log("all-to-all", what, sources[0].as_strided((total,), (0,))):
            before: tuple[Awaited | None, int, Tensor] | None = None
            for source, target in zip(sources, targets, strict=True):
                came, turn = self._push(source)
                _copy(target[rank], source[rank])
                if before is not None:
                    self._take(*before)
                before = came, turn, target
            if before is not None:
                self._take(*before)

    def gather(self, whole: Tensor, part: Tensor, what: str) -> None:
        """Fill ``whole``, ``[ranks * n]``, with every rank's ``part``, ``[n]``. Collective."""
        ranks, rank = self.axis.world_size, self.axis.rank
        with self.axis.log("all-gather", what, part):
            parts = whole.view(ranks, -1)
            came, turn = self._push(part.expand(ranks, -1))
            _copy(parts[rank], part)
            self._take(came, turn, parts)

    def sum_of_parts(self, whole: Tensor, what: str) -> Tensor:
        """This rank's part, ``[n]``, of the sum of all ranks' ``whole``, ``[ranks * n]``, taken in fp32 in the order of
        the ranks and rounded once. Collective."""
        ranks, rank = self.axis.world_size, self.axis.rank
        parts = whole.view(ranks, -1)
        with self.axis.log("reduce-scatter", what, parts[rank]):
            came, turn = self._push(parts)
            wait(came)
            rows = dict(self._arrived(turn, parts))
            rows[rank] = parts[rank]
            if ranks == 2:
                return rows[0] + rows[1]
            total = rows[0].float()
            for other in range(1, ranks):
                total += rows[other]
            return total.to(whole.dtype)

    def _push(self, pieces: Tensor) -> tuple[Awaited | None, int]:
        """Send ``[ranks, *piece]``; when what comes in turn has come, and which turn it is."""
        axis = self.axis
        ranks, rank = axis.world_size, axis.rank
        if (nbytes := pieces[0].numel() * pieces.itemsize) > self._row_nbytes:
            self._make_room(nbytes)
        turn, self._turn = self._turn, (self._turn + 1) % _TURNS
        with self._stream:
            for step in range(1, ranks):  # each begins with another
                other = (rank + step) % ranks
                # What rank p sends to rank r lies there in row p - r - 1, modulo the number of ranks.
                _copy(self._row(other, turn, ranks - step - 1, pieces), pieces[other])
            self._meet()
            return self._stream.event(), turn

    def _take(self, came: Awaited | None, turn: int, targets: Tensor) -> None:
        wait(came)
        for other, row in self._arrived(turn, targets):
            _copy(targets[other], row)

    def _arrived(self, turn: int, like: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Other ranks and what came of them, in the shape of a piece of ``like``."""
        ranks, rank = self.axis.world_size, self.axis.rank
        for step in range(1, ranks):
            yield (rank + step) % ranks, self._row(rank, turn, step - 1, like)

    def _row(self, owner: int, turn: int, row: int, like: Tensor) -> Tensor:
        """Kept, for each view costs the host as much as half a launch."""
        shape, dtype = like.shape[1:], like.dtype
        key = owner, turn, row, shape, dtype
        found = self._rows.get(key)
        if found is None:
            nbytes = shape.numel() * dtype.itemsize
            found = self._rows[key] = self._slots[owner][turn, row, :nbytes].view(dtype).view(shape)
        return found

    def _make_room(self, nbytes: int) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # what lay in the slots was taken
        others = self.axis.world_size - 1
        self._row_nbytes = -(-nbytes // 512) * 512
        self._rows.clear()
        self._slots = ()
        mapped = self._mapping(_TURNS * others * self._row_nbytes, torch.uint8)
        self._slots = [each.view(_TURNS, others, -1) for each in mapped]


def _copy(target: Tensor, source: Tensor) -> None:
    """Of one shape and dtype. In words where both have them: a strided copy of 16-bit elements takes 1.7 times as
    long."""
    if _has_words(target) and _has_words(source):
        target, source = target.view(_WORD), source.view(_WORD)
    target.copy_(source, non_blocking=True)


def _has_words(tensor: Tensor) -> bool:
    if tensor.dim() < 2 or tensor.stride(-1) != 1 or tensor.data_ptr() % _WORD.itemsize:
        return False
    each = _WORD.itemsize // tensor.itemsize
    sizes = (tensor.shape[-1], tensor.storage_offset(), *tensor.stride()[:-1])
    return each > 0 and all(size % each == 0 for size in sizes)


def exchanges_for(axis: Axis, tensor: Tensor, nbytes: int) -> PeerExchanges | None:
    """Those that an engine opened along ``axis``, where they are faster than NCCL for ``nbytes`` like ``tensor`` that
    each process sends."""
    opened = axis.log.exchanges
    if opened is None or nbytes < LEAST_PUSHED_NBYTES or not tensor.is_cuda:
        return None
    found: PeerExchanges | None = opened()
    return found
