"""What activations need of other processes, by copies between the GPUs of one host, see ``peers``: all-to-alls of
pieces, gathers, and sums that leave each process its part.

Against NCCL's collectives: a piece goes from where the model computed it straight into the memory of the process that
it is for, and from there to where that one reads it. NCCL wants pieces in one buffer and gives another, which is two
more passes over the memory. And copy engines do it, beside a computation that has all multiprocessors.

What comes lies in one of a few slots. On the communication stream a rank pushes, and then meets the others: what they
pushed has come. The main stream waits for that, and takes it out of the slot. The communication stream begins each push
behind what the main stream was given before. So once all ranks have met again after they took what came in a slot, it
may be written to; where no push came in between, they meet for that alone.

All ranks ask for the same in the same order, so slots and meetings agree. That pieces lie in the same order of
dimensions on all of them is seen from the log of the axis, which compares it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_hf.engine.comm.mesh import Axis
from ds_hf.engine.comm.streams import Awaited, CommStream, wait
from ds_hf.errors import DsHfError

__all__ = ["LEAST_PUSHED_NBYTES", "PeerExchanges", "Started", "exchanges_for", "laid_as"]

# That a process sends in one exchange. Below, the host is what the GPUs wait for, and NCCL's one launch is faster.
LEAST_PUSHED_NBYTES = 8 << 20
# Two chunks of heads on their way, the gradient of one that waits while a checkpoint computes them again, and one that
# is empty long enough. What a checkpoint began and did not end (it stops when it has what it needs) gives way.
_SLOTS = 4
_ALIGNMENT = 512  # bytes: where pieces of any dtype may begin
_WORD = torch.complex128  # 16 bytes, which a kernel copies at once
_DEVICE = 2  # CU_MEMORYTYPE_DEVICE


class _Piece(NamedTuple):
    """What one tensor of an exchange brings: its place in a row, and its dimensions in the order in which they lie."""

    begin: int
    nbytes: int  # of its place
    shape: torch.Size
    order: tuple[int, ...]


class Started(NamedTuple):
    """An exchange that is under way: its number, its slot, and what waits for it and takes what came."""

    number: int
    slot: int
    take: Callable[[], None]


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
        self._slots: Sequence[Tensor] = ()  # of each rank, [slots, other ranks, bytes]
        self._row_nbytes = 0
        self._count = 0  # exchanges that were started
        self._meetings = 0
        self._holders: list[int | None] = [None] * _SLOTS  # exchanges whose values lie in each slot
        self._emptied = [-1] * _SLOTS  # how many meetings there had been
        self._rows: dict[tuple[Any, ...], Tensor] = {}

    def exchange(self, sources: Sequence[Tensor], targets: Sequence[Tensor], what: str) -> None:
        """An all-to-all of several tensors. Collective.

        Args:
            sources: ``[ranks, *piece]`` of one dtype and any strides: what each rank is to get.
            targets: the same shapes: where what each rank has for this one is written.
            what: whose values they are, for the log of the axis.
        """
        self.finish(self.start(sources, targets, what))

    def start(self, sources: Sequence[Tensor], targets: Sequence[Tensor], what: str) -> Started:
        """The same, under way beside what the main stream gets next. Collective. ``targets`` may be read after
        ``finish``; ``sources`` may be given back at once."""
        rank = self.axis.rank
        total = sum(source.numel() for source in sources)
        pieces = _pieces(sources, (rank + 1) % self.axis.world_size)
        laid = " ".join("".join(map(str, piece.order)) for piece in pieces)
        with self.axis.log("all-to-all", f"{what} ({laid})", sources[0].as_strided((total,), (0,))):
            slot, came, rows = self._push(sources, pieces)
            for source, target in zip(sources, targets, strict=True):
                _copy(target[rank], source[rank])
        return Started(self._count, slot, self.axis.log.waiting(partial(_take, came, rows, pieces, targets)))

    def finish(self, started: Started) -> None:
        """The main stream goes on when what was started has come, and lies in its targets. Collective.

        Raises:
            DsHfError: its slot was taken by a later one.
        """
        if self._holders[started.slot] != started.number:
            raise DsHfError("an exchange of activations was to be finished twice, or too many were under way")
        started.take()
        self._empty(started.slot)

    def gather(self, whole: Tensor, part: Tensor, what: str) -> None:
        """Fill ``whole``, ``[ranks * n]``, with every rank's ``part``, ``[n]``. Collective."""
        ranks, rank = self.axis.world_size, self.axis.rank
        parts, given = whole.view(ranks, -1), part.expand(ranks, -1)
        with self.axis.log("all-gather", what, part):
            pieces = _pieces([given], rank)
            slot, came, rows = self._push([given], pieces)
            _copy(parts[rank], part)
            _take(came, rows, pieces, [parts])
            self._empty(slot)

    def sum_of_parts(self, whole: Tensor, what: str) -> Tensor:
        """This rank's part, ``[n]``, of the sum of all ranks' ``whole``, ``[ranks * n]``, taken in fp32 in the order of
        the ranks and rounded once. Collective."""
        ranks, rank = self.axis.world_size, self.axis.rank
        parts = whole.view(ranks, -1)
        with self.axis.log("reduce-scatter", what, parts[rank]):
            slot, came, rows = self._push([parts], _pieces([parts], rank))
            wait(came)
            found = {rank: parts[rank], **{other: row for other, (row,) in rows.items()}}
            if ranks == 2:
                total = found[0] + found[1]
            else:
                total = found[0].float()
                for other in range(1, ranks):
                    total += found[other]
            self._empty(slot)
            return total.to(whole.dtype)

    def _push(
        self, sources: Sequence[Tensor], pieces: tuple[_Piece, ...]
    ) -> tuple[int, Awaited | None, dict[int, list[Tensor]]]:
        """Send each ``[ranks, *piece]``: the slot, when what others sent has come, and the rows of each of them in
        which it lies."""
        rank, ranks = self.axis.rank, self.axis.world_size
        if (nbytes := pieces[-1].begin + pieces[-1].nbytes) > self._row_nbytes:
            self._make_room(nbytes)
        self._count += 1
        slot = min(range(_SLOTS), key=lambda slot: (self._holders[slot] or 0, self._emptied[slot]))
        self._holders[slot] = self._count
        rows = {}
        with self._stream:
            if self._emptied[slot] == self._meetings:  # others may still be taking what came there
                self._met()
            for step in range(1, ranks):  # each begins with another
                other = (rank + step) % ranks
                # What rank p sends to rank r lies there in row p - r - 1, modulo the number of ranks.
                there = [self._row(other, slot, ranks - step - 1, *each) for each in zip(pieces, sources, strict=True)]
                for row, piece, source in zip(there, pieces, sources, strict=True):
                    _send(row, source[other].permute(piece.order), self._stream)
                rows[other] = [self._row(rank, slot, step - 1, *each) for each in zip(pieces, sources, strict=True)]
            self._met()
            return slot, self._stream.event(), rows

    def _empty(self, slot: int) -> None:
        self._holders[slot], self._emptied[slot] = None, self._meetings

    def _met(self) -> None:
        self._meet()
        self._meetings += 1

    def _row(self, owner: int, slot: int, row: int, piece: _Piece, like: Tensor) -> Tensor:
        """A piece in a slot, as it lies there; kept, for each view costs the host as much as half a launch."""
        key = owner, slot, row, piece, like.dtype
        found = self._rows.get(key)
        if found is None:
            nbytes = piece.shape.numel() * like.itemsize
            there = self._slots[owner][slot, row, piece.begin : piece.begin + nbytes]
            found = self._rows[key] = there.view(like.dtype).view([piece.shape[dim] for dim in piece.order])
        return found

    def _make_room(self, nbytes: int) -> None:
        """Slots with rows of ``nbytes``. What is under way keeps its rows of the old ones, and its slot."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the others' memory is written to no more
        others = self.axis.world_size - 1
        self._row_nbytes = nbytes
        self._rows = {}
        self._slots = ()
        mapped = self._mapping(_SLOTS * others * nbytes, torch.uint8)
        self._slots = [each.view(_SLOTS, others, -1) for each in mapped]


def _order_of(tensor: Tensor) -> tuple[int, ...]:
    """Its dimensions as they lie in memory, the one with the largest stride first."""
    strides = tensor.stride()
    return tuple(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))


def laid_as(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Memory for ``shape``, which is of as many dimensions as ``tensor``, in their order."""
    order = _order_of(tensor)
    laid = tensor.new_empty([shape[dim] for dim in order])
    return laid.permute([order.index(dim) for dim in range(tensor.dim())])


def _take(
    came: Awaited | None, rows: dict[int, list[Tensor]], pieces: tuple[_Piece, ...], targets: Sequence[Tensor]
) -> None:
    wait(came)
    for other, there in rows.items():
        for row, piece, target in zip(there, pieces, targets, strict=True):
            _copy(target[other].permute(piece.order), row)


def _pieces(sources: Sequence[Tensor], place: int) -> tuple[_Piece, ...]:
    found, begin = [], 0
    for source in sources:
        given = source[place]
        order = _order_of(given)
        nbytes = given.numel() * given.itemsize
        nbytes = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        found.append(_Piece(begin, nbytes, given.shape, order))
        begin += nbytes
    return tuple(found)


class _Copy2d(ctypes.Structure):
    """``CUDA_MEMCPY2D`` of the CUDA driver."""

    _fields_ = (
        *(
            (f"{side}{name}", kind)
            for side in ("src", "dst")
            for name, kind in (
                ("XInBytes", ctypes.c_size_t),
                ("Y", ctypes.c_size_t),
                ("MemoryType", ctypes.c_uint),
                ("Host", ctypes.c_void_p),
                ("Device", ctypes.c_uint64),
                ("Array", ctypes.c_void_p),
                ("Pitch", ctypes.c_size_t),
            )
        ),
        ("WidthInBytes", ctypes.c_size_t),
        ("Height", ctypes.c_size_t),
    )


def _send(row: Tensor, source: Tensor, stream: CommStream) -> None:
    """Copy ``source`` into a contiguous ``row`` of another GPU: by a copy engine where it consists of runs of one
    length at one distance, else by a kernel."""
    runs = _runs(source.shape, source.stride()) if stream.stream is not None else None
    if runs is None or runs[0] * source.itemsize < _ALIGNMENT:
        _copy(row, source)
        return
    length, distance = (each * source.itemsize for each in runs)
    copy = _Copy2d(
        srcMemoryType=_DEVICE,
        srcDevice=source.data_ptr(),
        srcPitch=distance,
        dstMemoryType=_DEVICE,
        dstDevice=row.data_ptr(),
        dstPitch=length,
        WidthInBytes=length,
        Height=source.numel() * source.itemsize // length,
    )
    assert stream.stream is not None
    error = _driver().cuMemcpy2DAsync_v2(ctypes.byref(copy), ctypes.c_void_p(stream.stream.cuda_stream))
    if error:
        raise RuntimeError(f"the CUDA driver cannot copy activations to another GPU: error {error}")


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _runs(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int] | None:
    """Elements of each run of a tensor, and from where one begins to where the next does; ``None`` for a tensor that is
    something else."""
    length, at = 1, len(shape)
    while at and (shape[at - 1] == 1 or strides[at - 1] == length):
        length *= shape[at - 1]
        at -= 1
    distance = reach = length
    for size, stride in zip(shape[:at][::-1], strides[:at][::-1], strict=True):
        if size == 1:
            continue
        if reach == length:
            distance = reach = stride
        elif stride != reach:
            return None
        reach *= size
    return (length, distance) if distance >= length and 0 not in shape else None


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
