"""NCCL called without c10d in between, for the collectives of which a step has one per unit.

c10d costs the host a tenth of a millisecond per collective: a work object, events, the flight recorder's stack trace.
Here the communicator of the same process group gets the same calls of NCCL. So ranks need not choose alike, and what
others do with the group through c10d (the norm's all-reduce, barriers, the Trainer's) stays in order with it.

Invariants
- What is asked for runs on the current stream, as c10d's synchronous collectives do (torch 2.8 and later): tensors that
  the current stream may use now, and whose memory comes back to it or is kept by others, need no more care. Callers
  run on a lane with the lane's memory or the engine's own, or on the main stream.
- NCCL orders what one communicator is given, on whatever streams, by the order of the calls; one thread calls at a
  time, for backward's thread runs while the main one waits for it. The GIL is let go of meanwhile.
- No communicator is kept: each call asks torch for it, which makes it in the group's first collective, by c10d, and
  refuses when it was aborted or destroyed. Groups that torch no longer knows are not asked.
- Nothing is done here that c10d would do otherwise: other backends, dtypes and devices, non-blocking communicators, and
  what debugs c10d (``_switched_off``) stay with it.

c10d's watchdog and flight recorder do not see these collectives. Every step of sharded states has c10d's all-reduce of
the norm behind them, which times out for them; ``watch`` tells where ranks parted, also where nothing is optimized.
CUDA graphs capture NCCL's calls as they do c10d's; torch.compile never sees them: hooks are outside of compiled blocks.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from ctypes import c_char_p, c_int, c_size_t, c_void_p
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import DebugLevel, get_debug_level
from torch.distributed.distributed_c10d import _world

from ds_hf.engine.dist.mesh import Axis

__all__ = ["Communicator", "of"]

# Of nccl.h (NVIDIA/nccl, src/nccl.h.in): ncclDataType_t, ncclRedOp_t, ncclResult_t and the signatures.
_TYPES = {torch.float16: 6, torch.float32: 7, torch.float64: 8, torch.bfloat16: 9}
_SUM, _AVG = 0, 4
_IN_PROGRESS = 7
_FINE = (0, _IN_PROGRESS)
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "ncclGetVersion": (c_void_p,),
    "ncclAllGather": (c_void_p, c_void_p, c_size_t, c_int, c_void_p, c_void_p),
    "ncclReduceScatter": (c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
    "ncclCommGetAsyncError": (c_void_p, c_void_p),
    "ncclGetErrorString": (c_int,),
    "ncclGetLastError": (c_void_p,),
}
_TEXTS = ("ncclGetErrorString", "ncclGetLastError")

_OFF = ("", "0", "n", "no", "f", "false")
_SWITCHES = (  # torch's, by which c10d does other or more than to call NCCL
    "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_BLOCKING_WAIT",
    "TORCH_NCCL_USE_COMM_NONBLOCKING",
    "TORCH_NCCL_NAN_CHECK",
    "TORCH_NCCL_DESYNC_DEBUG",
    "NCCL_DESYNC_DEBUG",
)

# None: c10d, for good. What a group may do was settled when it was made.
_communicators: WeakKeyDictionary[dist.ProcessGroup, Communicator | None] = WeakKeyDictionary()


class Communicator:
    """The communicator of one process group on this process's device. Tensors are as in ``collectives``.

    Args:
        library: NCCL's functions, as ``_declared`` made them.
        pointer: the present communicator of the current device, 0 for none yet; raises when it is gone.
        world_size: ranks of the group.
    """

    def __init__(self, library: Any, pointer: Callable[[], int], world_size: int) -> None:
        self._library, self._pointer, self._world_size = library, pointer, world_size
        self._present = 0  # as ``ready`` found it, for the call that follows

    def ready(self) -> bool:
        """Whether there is a communicator; asked before each call."""
        try:
            self._present = self._pointer()
        except RuntimeError:  # aborted or destroyed, of which c10d tells
            self._present = 0
        return self._present != 0

    def all_gather(self, full: Tensor, shard: Tensor) -> None:
        """``collectives.all_gather``.

        Raises:
            DistBackendError: NCCL refused.
        """
        self._check("all-gather", self._gather(full, shard))

    def all_gather_each(self, fulls: Sequence[Tensor], shards: Sequence[Tensor]) -> None:
        """``collectives.all_gather_each``, in one launch.

        Raises:
            DistBackendError: NCCL refused.
        """
        self._check("group of all-gathers", self._library.ncclGroupStart())
        result = 0
        try:
            for full, shard in zip(fulls, shards, strict=True):
                result = self._gather(full, shard)
                if result not in _FINE:
                    break
        finally:  # or whatever comes next would belong to the group
            ended = self._library.ncclGroupEnd()
        self._check("group of all-gathers", ended if result in _FINE else result)

    def reduce_scatter(self, shard: Tensor, full: Tensor, *, average: bool) -> None:
        """Fill ``shard`` with this rank's part of the sum, or mean, of every rank's ``full``.

        Raises:
            DistBackendError: NCCL refused.
        """
        numel = self._agreed(full, shard)
        result = self._library.ncclReduceScatter(
            full.data_ptr(),
            shard.data_ptr(),
            numel,
            _TYPES[shard.dtype],
            _AVG if average else _SUM,
            self._present,
            torch._C._cuda_getCurrentRawStream(shard.get_device()),
        )
        self._check("reduce-scatter", result)

    def _gather(self, full: Tensor, shard: Tensor) -> int:
        numel = self._agreed(full, shard)
        result: int = self._library.ncclAllGather(
            shard.data_ptr(),
            full.data_ptr(),
            numel,
            _TYPES[shard.dtype],
            self._present,
            torch._C._cuda_getCurrentRawStream(shard.get_device()),
        )
        return result

    def _agreed(self, full: Tensor, shard: Tensor) -> int:
        """Elements of ``shard``. NCCL gets addresses, and sees nothing of what c10d would refuse."""
        numel = shard.numel()
        assert full.dtype is shard.dtype and full.numel() == numel * self._world_size
        assert full.get_device() == shard.get_device() and full.is_contiguous() and shard.is_contiguous()
        return numel

    def _check(self, operation: str, result: int) -> None:
        if result == 0:
            return
        code = c_int(result)
        while code.value == _IN_PROGRESS:  # a torch that makes non-blocking communicators unasked
            self._library.ncclCommGetAsyncError(self._present, ctypes.addressof(code))
        if code.value != 0:
            kind = self._library.ncclGetErrorString(code.value).decode(errors="replace")
            detail = self._library.ncclGetLastError(self._present).decode(errors="replace").strip()
            raise dist.DistBackendError(f"NCCL {operation}: {kind}" + (f": {detail}" if detail else ""))


def of(axis: Axis, *tensors: Tensor) -> Communicator | None:
    """What does the next collective of ``tensors``, ``None`` where that is c10d. About a microsecond."""
    index = tensors[0].get_device()
    for tensor in tensors:
        if not tensor.is_cuda or tensor.dtype not in _TYPES or tensor.get_device() != index:
            return None
    group = dist.group.WORLD if axis.group is None else axis.group
    if group is None or group not in _world.pg_map:  # destroyed
        return None
    try:
        found = _communicators[group]
    except KeyError:
        found = _communicators[group] = _open(group)
    # torch knows the communicator of the current device.
    if found is None or torch._C._cuda_getDevice() != index or not found.ready():
        return None
    return found


def _open(group: dist.ProcessGroup) -> Communicator | None:
    kind: Any = getattr(dist, "ProcessGroupNCCL", None)
    try:
        backend: Any = group._get_backend(torch.device("cuda"))
    except RuntimeError:  # none for this kind of device
        return None
    # A subclass, or what wraps a backend to check collectives, does things of its own.
    if kind is None or type(backend) is not kind or not hasattr(backend, "_comm_ptr") or _switched_off(backend):
        return None
    library = _library()
    return None if library is None else Communicator(library, backend._comm_ptr, group.size())


def _switched_off(backend: Any) -> bool:
    asked = any(os.environ.get(name, "").strip().lower() not in _OFF for name in _SWITCHES)
    blocking = getattr(getattr(backend.options, "config", None), "blocking", None)
    return asked or blocking == 0 or get_debug_level() == DebugLevel.DETAIL


@cache
def _library() -> Any:
    """The NCCL that torch itself calls, ``None`` where that cannot be said for sure."""
    try:
        library = _declared(_torchs_symbols())
        theirs = dist.ProcessGroupNCCL.get_runtime_nccl_version()  # type: ignore[call-arg]
    except (AttributeError, OSError, TypeError):  # another build of torch, without NCCL or with one that nobody else can call
        return None
    version = c_int()
    if library.ncclGetVersion(ctypes.addressof(version)) != 0:
        return None
    major, minor, patch = theirs[:3]
    return library if version.value == major * 10000 + minor * 100 + patch else None


def _torchs_symbols() -> ctypes.CDLL:
    """Symbols are looked up in the library that calls NCCL, then in those it was linked to: never in one of the same
    name that somebody else has loaded."""
    return ctypes.CDLL("libtorch_cuda.so", mode=os.RTLD_NOLOAD)


def _declared(library: Any) -> Any:
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, c_char_p if name in _TEXTS else c_int
    return library
