"""All-to-alls of activations by copies between the GPUs of one host, see ``peers``: what divided sequences exchange.

A rank puts what others are to get into a slot of its own memory. On the communication stream all meet, and each copies
what it is to get out of the others' slots, straight to where it is read. NCCL wants pieces in one buffer and gives
another, which is one more pass over the memory; and copy engines take no multiprocessor from a computation beside them.
(To push into the others' memory saves nothing, and not every GPU can be told to see what came before it was told so.)

A slot is written to again when all ranks have met once more on their communication streams, behind their copies; where
no exchange came in between, they meet for that alone. All ranks ask for the same in the same order, so slots and
meetings agree. That pieces lie in the same order of dimensions on all of them is seen from the log of the axis, which
compares it.
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

__all__ = ["LEAST_EXCHANGED_NBYTES", "PeerExchanges", "Started", "exchanges_for", "laid_as"]

# That a process sends in one exchange. Below, the host is what the GPUs wait for, and NCCL's one launch is faster.
LEAST_EXCHANGED_NBYTES = 8 << 20
# Two chunks of heads on their way, the gradient of one that waits while a checkpoint computes them again, and one that
# others have left. What a checkpoint began and did not end (it stops when it has what it needs) gives way.
_SLOTS = 4
_ALIGNMENT = 512  # bytes: where pieces of any dtype may begin, and the shortest run that a copy engine is given
_WORD = torch.complex128  # 16 bytes, which a kernel copies at once
_DEVICE = 2  # CU_MEMORYTYPE_DEVICE


class _Piece(NamedTuple):
    """What one tensor of an exchange brings: its place in a row, and its dimensions in the order in which they lie."""

    begin: int
    nbytes: int  # of its place
    shape: torch.Size
    order: tuple[int, ...]


class Started(NamedTuple):
    """An exchange that is under way: its number, its slot, and what waits for it."""

    number: int
    slot: int
    wait: Callable[[], None]


class _Slot:
    """What a rank knows of one.

    Attributes:
        number: of the exchange that it is for; ``under_way``: it was not finished yet.
        kept: what is written to until then.
        left: when all ranks have met behind their copies out of it; ``None`` before they were asked to.
    """

    def __init__(self) -> None:
        self.number, self.under_way = 0, False
        self.kept: Sequence[Tensor] = ()
        self.left: Awaited | None = None


class PeerExchanges:
    """Of the ranks of ``axis``, which read each other's memory. What one rank asks for all ask for, in one order.

    Args:
        mapping: as ``Peers`` has it.
        meet: collective; what the current streams of all ranks were given before comes before what they get next.
        stream: on which ranks meet and copy, and nothing else.
    """

    def __init__(
        self,
        axis: Axis,
        mapping: Callable[[int, torch.dtype], Sequence[Tensor]],
        meet: Callable[[], None],
        stream: CommStream,
    ) -> None:
        self.axis, self._mapping, self._meet, self._stream = axis, mapping, meet, stream
        self._memory: Sequence[Tensor] = ()  # of each rank, [slots, other ranks, bytes]
        self._row_nbytes = 0
        self._count = 0  # exchanges that were started
        self._slots = [_Slot() for _ in range(_SLOTS)]
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
        """The same, under way beside what the main stream gets next. Collective.

        Args:
            sources: ``[ranks, *piece]`` of one dtype, which may be given back at once.
            targets: the same, which may be read after ``finish``.
        """
        rank = self.axis.rank
        total = sum(source.numel() for source in sources)
        pieces = _pieces(sources, (rank + 1) % self.axis.world_size)
        laid = " ".join("".join(map(str, piece.order)) for piece in pieces)
        with self.axis.log("all-to-all", f"{what} ({laid})", sources[0].as_strided((total,), (0,))):
            slot, came = self._travel(sources, targets, pieces)
            for source, target in zip(sources, targets, strict=True):
                _copy(target[rank], source[rank])
        return Started(self._count, slot, self.axis.log.waiting(partial(wait, came)))

    def finish(self, started: Started) -> None:
        """The main stream goes on when what was started has come, and lies in its targets. Collective.

        Raises:
            DsHfError: its slot was taken by a later one.
        """
        slot = self._slots[started.slot]
        if not slot.under_way or slot.number != started.number:
            raise DsHfError("an exchange of activations was to be finished twice, or too many were under way")
        started.wait()
        slot.under_way, slot.kept = False, ()

    def _travel(
        self, sources: Sequence[Tensor], targets: Sequence[Tensor], pieces: tuple[_Piece, ...]
    ) -> tuple[int, Awaited | None]:
        """Bring what others have for this rank into ``targets``: the slot, and when it has come."""
        rank, ranks = self.axis.rank, self.axis.world_size
        if (nbytes := pieces[-1].begin + pieces[-1].nbytes) > self._row_nbytes:
            self._make_room(nbytes)
        self._count += 1
        slot = min(range(_SLOTS), key=lambda place: (self._slots[place].under_way, self._slots[place].number))
        self._take_over(slot, targets)
        for step in range(1, ranks):
            other = (rank + step) % ranks
            for piece, source in zip(pieces, sources, strict=True):
                # What rank p has for rank r lies with it in row r - p - 1, modulo the number of ranks.
                _copy(self._row(rank, slot, step - 1, piece, source), source[other].permute(piece.order))
        with self._stream:
            self._met(but=slot)
            for step in range(1, ranks):  # each begins with another
                other = (rank - step) % ranks
                for piece, target in zip(pieces, targets, strict=True):
                    row = self._row(other, slot, step - 1, piece, target)
                    _bring(target[other].permute(piece.order), row, self._stream)
            return slot, self._stream.event()

    def _take_over(self, place: int, targets: Sequence[Tensor]) -> None:
        """The main stream goes on when all ranks have left the slot."""
        slot = self._slots[place]
        if slot.number:
            if slot.left is None:
                with self._stream:
                    self._met()
            wait(slot.left)
        slot.number, slot.under_way, slot.kept, slot.left = self._count, True, targets, None

    def _met(self, but: int | None = None) -> None:
        """All meet on the communication stream: behind their copies out of all slots ``but`` one that is new."""
        self._meet()
        met = self._stream.event() or _AT_ONCE
        for place, slot in enumerate(self._slots):
            if place != but and slot.left is None:
                slot.left = met

    def _row(self, owner: int, slot: int, row: int, piece: _Piece, like: Tensor) -> Tensor:
        """A piece in a slot, as it lies there; kept, for each view costs the host as much as half a launch."""
        key = owner, slot, row, piece, like.dtype
        found = self._rows.get(key)
        if found is None:
            nbytes = piece.shape.numel() * like.itemsize
            there = self._memory[owner][slot, row, piece.begin : piece.begin + nbytes]
            found = self._rows[key] = there.view(like.dtype).view([piece.shape[dim] for dim in piece.order])
        return found

    def _make_room(self, nbytes: int) -> None:
        """Slots with rows of ``nbytes``, and up to a quarter more: sequences that grow shall not need new ones each
        time, for the old ones' memory is not given back before the end."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # this rank has left the others' memory; they map their new one after that, too
        others = self.axis.world_size - 1
        step = max(_ALIGNMENT, 1 << nbytes.bit_length() - 3)
        self._row_nbytes = nbytes = -(-nbytes // step) * step
        self._rows, self._memory = {}, ()
        mapped = self._mapping(_SLOTS * others * nbytes, torch.uint8)
        self._memory = [each.view(_SLOTS, others, -1) for each in mapped]


class _AtOnce:
    def wait(self) -> None:
        """Nothing is under way on a CPU."""


_AT_ONCE = _AtOnce()


def _order_of(tensor: Tensor) -> tuple[int, ...]:
    """Its dimensions as they lie in memory, the one with the largest stride first."""
    strides = tensor.stride()
    return tuple(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))


def laid_as(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Memory of the dtype of ``tensor`` for ``shape``, ``[n, ...]``, whose dimensions lie in the order of its own."""
    order = _order_of(tensor)
    laid = tensor.new_empty([shape[dim] for dim in order])
    return laid.permute([order.index(dim) for dim in range(tensor.dim())])


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


def _bring(target: Tensor, row: Tensor, stream: CommStream) -> None:
    """Copy a contiguous ``row`` of another GPU into ``target``: by a copy engine where that consists of runs of one
    length at one distance, else by a kernel."""
    runs = _runs(target.shape, target.stride()) if stream.stream is not None else None
    if runs is None or runs[0] * target.itemsize < _ALIGNMENT:
        _copy(target, row)
        return
    length, distance = (each * target.itemsize for each in runs)
    copy = _Copy2d(
        srcMemoryType=_DEVICE,
        srcDevice=row.data_ptr(),
        srcPitch=length,
        dstMemoryType=_DEVICE,
        dstDevice=target.data_ptr(),
        dstPitch=distance,
        WidthInBytes=length,
        Height=target.numel() * target.itemsize // length,
    )
    assert stream.stream is not None
    error = _driver().cuMemcpy2DAsync_v2(ctypes.byref(copy), ctypes.c_void_p(stream.stream.cuda_stream))
    if error:
        raise RuntimeError(f"the CUDA driver cannot copy activations from another GPU: error {error}")


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
    """Those that an engine opened along ``axis``, where they are faster than NCCL for ``nbytes`` of ``tensor``, of any
    shape and dtype, that each process sends."""
    opened = axis.log.exchanges
    if opened is None or nbytes < LEAST_EXCHANGED_NBYTES or not tensor.is_cuda:
        return None
    found: PeerExchanges | None = opened()
    return found
