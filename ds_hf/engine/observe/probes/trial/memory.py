"""Peak bytes of a step, and an artificial limit to them.

On CUDA the allocator knows both: its peak, and a fraction of the device above which it raises. Elsewhere what counts is
the bytes of tensors, which are the same every time where the resident set of a process is not (but for what gloo's
threads let go of a moment earlier or later): at rest the storages of
parameters, masters, moments and buffers, and on top of that every storage that an operator makes, as long as it lives.
A limit raises ``torch.OutOfMemoryError`` inside the operator that crosses it, as an allocator would.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_hf import host

if TYPE_CHECKING:
    from ds_hf.engine.engine import CoreEngine

__all__ = [
    "CudaMeter",
    "MemoryMeter",
    "TensorMeter",
    "is_out_of_memory",
    "memory_meter",
    "resident_tensors",
    "room_for_snapshot",
]

HOST_SHARE = 0.5  # of the free host memory of this rank


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that memory ran out, on the device or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)


def resident_tensors(engine: CoreEngine) -> Iterator[Tensor]:
    """Everything that the engine keeps between steps; the same storage may come twice."""
    for unit in engine.units:
        for buffer in unit.buffers:
            yield buffer.full
            yield buffer.shard
    for param in engine.module.parameters():
        yield param.data
    yield from engine.module.buffers()
    if engine.optimizer is not None:
        yield from (*engine.optimizer.masters.values(), *engine.optimizer.low_bits.values())
        for state in engine.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
    for gradient in engine.reducer.buffers:
        yield from (value for value in (gradient.partial, gradient.owned) if value is not None)


def _nbytes(tensors: Iterator[Tensor], device: torch.device) -> int:
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors if t.device == device}
    return sum(storage.nbytes() for storage in storages.values())


class MemoryMeter:
    """Interface of both meters.

    Attributes:
        total: bytes that count as the device's memory, ``None`` where there is no such figure.
    """

    total: int | None

    def at_rest(self) -> int:
        """Bytes held now."""
        raise NotImplementedError

    def peak(self) -> int:
        """Most bytes since the last watch; what is held now where they were not counted."""
        return self.at_rest()

    @contextmanager
    def watch(self, found: list[int]) -> Iterator[None]:
        """Append the peak inside to ``found``, also when the limit is crossed."""
        raise NotImplementedError
        yield


class CudaMeter(MemoryMeter):
    """The caching allocator's figures."""

    def __init__(self, device: torch.device, limit: int | None) -> None:
        self.device = device
        free, real = torch.cuda.mem_get_info(device)
        usable = free + torch.cuda.memory_reserved(device)  # without what contexts and other processes hold
        self.total = min(usable, limit) if limit else usable
        if limit and limit < real:
            torch.cuda.set_per_process_memory_fraction(limit / real, device)

    def at_rest(self) -> int:
        return int(torch.cuda.memory_allocated(self.device))

    def peak(self) -> int:
        return int(torch.cuda.max_memory_reserved(self.device))

    @contextmanager
    def watch(self, found: list[int]) -> Iterator[None]:
        gc.collect()
        torch.cuda.empty_cache()  # what a larger batch left would count as this one's
        torch.cuda.reset_peak_memory_stats(self.device)
        try:
            yield
        finally:
            # reserved and not allocated: fragmentation needs room too
            found.append(int(torch.cuda.max_memory_reserved(self.device)))


class TensorMeter(MemoryMeter):
    """Counts storages of tensors."""

    def __init__(self, engine: CoreEngine, limit: int | None) -> None:
        self.engine = engine
        self.total = limit

    def at_rest(self) -> int:
        return _nbytes(resident_tensors(self.engine), self.engine.device)

    @contextmanager
    def watch(self, found: list[int]) -> Iterator[None]:
        gc.collect()  # when cycles go must not decide the figure
        gc.disable()
        mode = _Tracker(self.engine, self.total)
        try:
            with torch.compiler.set_stance("force_eager"), mode:
                yield
        finally:
            gc.enable()
            found.append(mode.peak)


class _Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the storages that operators make, and those that engines resize behind the dispatcher's back."""

    def __init__(self, engine: CoreEngine, limit: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.limit = limit
        self.device = engine.device
        gathered = [buffer.full for unit in engine.units for buffer in unit.buffers]
        self.resizable = list({t.untyped_storage()._cdata: t.untyped_storage() for t in gathered}.values())
        known = {storage._cdata for storage in self.resizable}
        tensors = [t for t in resident_tensors(engine) if t.untyped_storage()._cdata not in known]
        self.live = _nbytes(iter(tensors), self.device)
        self.known = known | {tensor.untyped_storage()._cdata for tensor in tensors}
        self.peak = 0
        self._look()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and value.device == self.device:
                self._add(value)
        self._look()
        return result

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self.known or not nbytes:
            return
        self.known.add(key)
        self.live += nbytes
        weakref.finalize(storage, self._drop, key, nbytes).atexit = False

    def _drop(self, key: int, nbytes: int) -> None:
        self.known.discard(key)
        self.live -= nbytes

    def _look(self) -> None:
        now = self.live + sum(storage.nbytes() for storage in self.resizable)
        self.peak = max(self.peak, now)
        if self.limit is not None and now > self.limit:
            raise torch.OutOfMemoryError(
                f"out of memory: {now} bytes of tensors, and the limit given to the autotuner is {self.limit}"
            )


def memory_meter(engine: CoreEngine, limit: int | None) -> MemoryMeter:
    """The meter of the engine's device."""
    return CudaMeter(engine.device, limit) if engine.device.type == "cuda" else TensorMeter(engine, limit)


def agree_max(engine: CoreEngine, value: int, reduce: Callable[[Tensor], Any]) -> int:
    """The largest ``value`` of all ranks."""
    tensor = torch.tensor([value], dtype=torch.int64, device=engine.device)
    reduce(tensor)
    return int(tensor)


def room_for_snapshot(engine: CoreEngine) -> bool:
    """Whether the host can hold a copy of what this rank owns."""
    if engine.optimizer is not None and engine.optimizer.store.splits:
        return False
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in resident_tensors(engine)}
    return bool(sum(storages.values()) <= HOST_SHARE * host.available_memory() / host.local_world_size())
