"""Memory that the ranks of one host map of each other: gathers and sums by the GPUs' copy engines.

A rank copies what it needs out of the memory of the others, over NVLink. No multiprocessor is taken from the
computation, none of NCCL's launches is paid for, and no rank waits for another, except after a write.

Gradients go the other way: a rank pushes to each other what that one is to add up (``PeerSums``). Activations are new
each time, and are copied out of slots (``PeerExchanges``).

Invariants
- What is gathered was written before a meeting of all ranks: on the stream at the latest, before the copies.
- What is written is not being read. Memory that only ``writing`` announces writes to: after the last gather of it all
  ranks have met on their main streams, each behind its stream. Memory that users see, and write to when they like: a
  gather of it ends with a meeting, so that who may look at the result may write to its sources.
- All ranks gather and write the same regions in the same order, as with collectives, so they agree on when to meet.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hf.engine.comm.mesh import Axis
from ds_hf.engine.comm.peer_exchanges import PeerExchanges
from ds_hf.engine.comm.peer_sums import PeerSums
from ds_hf.engine.comm.streams import CommStream
from ds_hf.engine.events import Observer, Waits, told
from ds_hf.log import logger

__all__ = ["LEAST_COPIED_NBYTES", "Peers", "Region", "Signals", "attach_exchanges", "open_peers"]

# Of a buffer that copies bring. Below, the host is what the GPUs wait for, and it launches NCCL's one kernel for many
# buffers faster than copies and meetings for each of them.
LEAST_COPIED_NBYTES = 48 << 20

Mapping = Callable[[int, torch.dtype], "list[Tensor]"]
_GATHERS, _SUMS, _EXCHANGES = range(3)  # meetings on two streams at once are two kinds
_CHANNELS = 3
# Of the CUDA driver: CU_STREAM_MEM_OP_WAIT_VALUE_32 (for >=), CU_STREAM_MEM_OP_WRITE_VALUE_32 (after a fence),
# CU_STREAM_WAIT_VALUE_FLUSH, CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES.
_WAIT, _WRITE, _FLUSH, _CAN_FLUSH = 1, 2, 1 << 30, 98


class Peers:
    """The ranks of ``axis``, which read each other's memory.

    Args:
        comm_stream: on which gathers run.
        mapping: collective; flat memory of so many elements of a dtype on each rank, as this rank reaches it.
        meet: collective; what the current streams of all ranks were given before comes before what they get next. Its
            argument keeps meetings on two streams at once apart.
    """

    waits: Waits | None = None

    def __init__(self, axis: Axis, comm_stream: CommStream, mapping: Mapping, meet: Callable[[int], None]) -> None:
        self.axis, self.comm_stream = axis, comm_stream
        self._mapping, self._meet = mapping, meet
        self.met_on_main = 0  # meetings on the main streams

    def region(self, numel: int, dtype: torch.dtype, *, visible: bool = False) -> Region:
        """Memory for ``[numel]`` on each rank. Collective.

        Args:
            visible: users may write to it.
        """
        return Region(self, self._mapping(numel, dtype), visible)

    @told
    def meet_on_main(self) -> None:
        """What all ranks have asked for so far, gathers too, comes before what this rank asks for next."""
        self.comm_stream.join()
        self.meet()
        self.met_on_main += 1

    def meet(self) -> None:
        """What all ranks' current streams have been given comes before what this rank's is given next."""
        with self.axis.log("barrier", "the ranks' memory"):
            self._meet(_GATHERS)

    def sums(self) -> PeerSums:
        """For gradients. Collective."""
        return PeerSums(self.axis, self._mapping, lambda: self._meet(_SUMS))

    def exchanges(self) -> PeerExchanges:
        """For parts of sequences, on the communication stream, on which nothing else may be done."""
        return PeerExchanges(self.axis, self._mapping, lambda: self._meet(_EXCHANGES), self.comm_stream)


class Region:
    """As much memory on each rank.

    Attributes:
        mine: this rank's, ``[numel]``.
        theirs: every rank's, by its place on the axis; others than ``mine`` are for ``gather`` alone.
        visible: users may write to ``mine``: after a gather ``Peers.meet`` is called before they see the result.
    """

    def __init__(self, peers: Peers, theirs: Sequence[Tensor], visible: bool) -> None:
        self._peers, self.visible = peers, visible
        self.theirs = tuple(theirs)
        self.mine = self.theirs[peers.axis.rank]
        self._read_at = -1
        self._written = False  # since the last gather

    def writing(self) -> None:
        """Before this rank writes to ``mine``, on the main stream. Collective."""
        if self._read_at == self._peers.met_on_main:
            self._peers.meet_on_main()
        self._written = True

    def gather(self, targets: Sequence[Tensor], sources: Sequence[Tensor], what: str) -> None:
        """Copy ``sources``, flat parts of ``theirs`` by rank, into ``targets`` of their dtype. Collective, on the
        communication stream.

        A target that is its source is left alone.
        """
        peers = self._peers
        if self._written:
            peers.meet()
            self._written = False
        if not self.visible:
            self._read_at = peers.met_on_main
        rank, world_size = peers.axis.rank, peers.axis.world_size
        with peers.axis.log("all-gather", what, sources[rank]):
            for step in range(1, world_size + 1):  # each begins with another rank, its own part comes last
                place = (rank + step) % world_size
                if targets[place].data_ptr() != sources[place].data_ptr():
                    targets[place].copy_(sources[place], non_blocking=True)


def open_peers(axis: Axis, device: torch.device, comm_stream: CommStream) -> Peers | None:
    """``None`` where ranks cannot read each other's memory: several hosts, no NVLink or PCIe access, another backend.

    Collective.
    """
    if axis.world_size == 1 or device.type != "cuda" or dist.get_backend(axis.group) != "nccl":
        return None
    able = torch.tensor([_reaches_all(axis, device), _flushes(device)], dtype=torch.int32, device=device)
    dist.all_reduce(able, op=dist.ReduceOp.MIN, group=axis.group)
    reaches, flushes = able.tolist()
    if not reaches:
        return None
    peers = _made(axis, device, comm_stream, flushes=bool(flushes))
    works = torch.tensor([peers is not None], dtype=torch.int32, device=device)
    dist.all_reduce(works, op=dist.ReduceOp.MIN, group=axis.group)
    return peers if works.item() else None


class _Opened(Observer):
    """Holds what an engine opened, as long as it lives."""

    def __init__(self, exchanges: PeerExchanges) -> None:
        self._exchanges: PeerExchanges | None = exchanges

    def close(self) -> None:
        """Its memory is given back, unless another engine uses it."""
        self._exchanges = None


def attach_exchanges(engine: Any) -> None:
    """Open those along the axis that divides the engine's sequences; a feature of it. Collective."""
    axis = engine.mesh.axis("sequence")
    found = None if axis.log.exchanges is None else axis.log.exchanges()
    if found is None:
        peers = open_peers(axis, engine.device, CommStream(engine.device))
        found = None if peers is None else peers.exchanges()
    if found is not None:
        axis.log.exchanges = weakref.ref(found)
        engine.events.add(_Opened(found))


def _made(axis: Axis, device: torch.device, comm_stream: CommStream, *, flushes: bool) -> Peers | None:
    """``None`` if a gather does not bring what was written."""
    try:
        gpus = _Gpus(axis, device, flushes=flushes)
        peers = Peers(axis, comm_stream, gpus, gpus.meet)
        if _brings_what_was_written(peers):
            return peers
        reason = "other values came"
    except (AttributeError, RuntimeError, TypeError) as error:  # this torch's symmetric memory is another
        reason = str(error).splitlines()[0]
    logger.info("gathers go through NCCL: memory of other GPUs cannot be read (%s)", reason)
    return None


class _Gpus:
    """Memory of GPUs. torch's allocator counts it, and gives it back with the last region.

    Args:
        flushes: all of them can wait for a number and then see what was pushed before it.
    """

    def __init__(self, axis: Axis, device: torch.device, *, flushes: bool) -> None:
        self._memory: Any = _symmetric_memory()
        self._axis, self._device = axis, device
        group = dist.group.WORLD if axis.group is None else axis.group
        assert group is not None
        self._group = group.group_name
        self._pool = torch.cuda.MemPool(self._memory.get_mempool_allocator(device))
        self._shared: Any = None
        self._signals: Signals | None = None
        self._flushes = flushes

    def __call__(self, numel: int, dtype: torch.dtype) -> list[Tensor]:
        with torch.cuda.use_mem_pool(self._pool, self._device):
            mine = torch.empty(numel, dtype=dtype, device=self._device)
        shared = self._memory.rendezvous(mine, self._group)
        self._shared = self._shared or shared
        begin = (mine.data_ptr() - shared.buffer_ptrs[self._axis.rank]) // dtype.itemsize
        tensors = [shared.get_buffer(rank, (numel,), dtype, begin) for rank in range(self._axis.world_size)]
        tensors[self._axis.rank] = mine
        return tensors

    def meet(self, channel: int) -> None:
        """Through numbers in the ranks' memory. By a kernel while a graph is captured, which would repeat the same
        numbers, and for what others pushed here where the GPU cannot be told to see it after their number."""
        if torch.cuda.is_current_stream_capturing() or (channel == _SUMS and not self._flushes):
            self._shared.barrier(channel=channel)
            return
        if self._signals is None:
            places = self(_CHANNELS * self._axis.world_size, torch.int32)
            places[self._axis.rank].zero_()
            self._shared.barrier(channel=channel)
            self._signals = Signals(places, self._axis.rank, _driver(), flushes=self._flushes)
        self._signals.meet(channel, torch._C._cuda_getCurrentRawStream(self._device.index))


class _MemoryOperation(ctypes.Structure):
    """``CUstreamBatchMemOpParams`` of the CUDA driver, as far as it is a write or a wait of 32 bits."""

    _fields_ = (
        ("operation", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
        ("unused", ctypes.c_uint64 * 2),
    )


class Signals:
    """Meetings that take no kernel: a GPU writes its count to all others, and waits until it has all of theirs.

    Its front end does both. A kernel would wait for a multiprocessor, and a product of matrices keeps all of them to
    its end: beside the computation a meeting took 1.8 ms where the copies after it took 0.5.

    Args:
        places: ``[channels * ranks]`` in int32 of each rank, zeros at first; a rank writes to its column of each row.
        driver: the CUDA driver's library.
        flushes: what others pushed before their number is seen after it.
    """

    def __init__(self, places: Sequence[Tensor], rank: int, driver: Any, *, flushes: bool) -> None:
        self._driver, self._places, ranks = driver, places, len(places)
        at = [place.data_ptr() for place in places]
        others = [other for other in range(ranks) if other != rank]
        self._counts = [0] * _CHANNELS
        self._asked: list[Any] = []
        for channel in range(_CHANNELS):
            asked = (_MemoryOperation * (2 * len(others)))()
            for number, other in enumerate(others):
                write, wait = asked[number], asked[len(others) + number]
                write.operation, write.address = _WRITE, at[other] + 4 * (channel * ranks + rank)
                wait.operation, wait.address = _WAIT, at[rank] + 4 * (channel * ranks + other)
                wait.flags = _FLUSH if flushes else 0
            self._asked.append(asked)

    def meet(self, channel: int, stream: int) -> None:
        """On ``stream``, a CUDA stream's address.

        Raises:
            RuntimeError: the driver refuses.
        """
        asked = self._asked[channel]
        self._counts[channel] = count = (self._counts[channel] + 1) & 0xFFFFFFFF  # the wait compares cyclically
        for each in asked:
            each.value = count
        error = self._driver.cuStreamBatchMemOp_v2(ctypes.c_void_p(stream), len(asked), asked, 0)
        if error:
            raise RuntimeError(f"the CUDA driver cannot write and wait on a stream: error {error}")


@cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RuntimeError(str(error)) from error


def _flushes(device: torch.device) -> bool:
    """Whether the GPU, after it waited for a number, sees what was written to its memory from outside before that."""
    answer = ctypes.c_int(0)
    try:
        error = _driver().cuDeviceGetAttribute(ctypes.byref(answer), _CAN_FLUSH, device.index)
    except RuntimeError:
        return False
    return not error and bool(answer.value)


def _reaches_all(axis: Axis, device: torch.device) -> bool:
    """Whether the memory of all ranks' GPUs can be reached, as far as this process can tell."""
    names: list[Any] = [None] * axis.world_size
    dist.all_gather_object(names, _name_of(device.index), group=axis.group)
    board = axis.log.board
    if _symmetric_memory() is None or board is None or len(board.ranks) < axis.world_size:
        return False
    visible = {_name_of(index): index for index in range(torch.cuda.device_count())}
    if len(set(names)) < axis.world_size or not visible.keys() >= set(names):
        return False
    others = [visible[name] for name in names if visible[name] != device.index]
    return all(torch.cuda.can_device_access_peer(device.index, other) for other in others)


def _name_of(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _brings_what_was_written(peers: Peers) -> bool:
    axis = peers.axis
    regions = [peers.region(64, torch.float32) for _ in range(2)]  # in one piece of memory, probably
    good = []
    for number, region in enumerate(regions):
        region.writing()
        region.mine.fill_(2 * axis.rank + number)
        found = torch.zeros(axis.world_size * 64, device=region.mine.device)
        with peers.comm_stream:
            region.gather(found.chunk(axis.world_size), region.theirs, "a trial of the peers' memory")
        peers.comm_stream.join()
        wanted = 2 * torch.arange(axis.world_size, device=found.device).repeat_interleave(64) + number
        good.append(bool((found == wanted).all()))
    return all(good)


def _symmetric_memory() -> Any:
    """torch's memory that several processes map, ``None`` where this build has none."""
    # Multicast is not needed here, and setting it up is a matter of the whole NVLink fabric.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    try:
        from torch._C._distributed_c10d import _SymmetricMemory
    except ImportError:
        return None
    return _SymmetricMemory
