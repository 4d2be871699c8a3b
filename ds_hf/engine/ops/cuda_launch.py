"""Launching the kernels of ``csrc/cuda``: the table of tensors a launch gets, tunings, and one ``KernelMachine`` a GPU.

Kernels go to the current stream of the GPU, nothing waits for it, and all of a launch's arguments are copied by the
driver during the call, so launches may be captured in a CUDA graph. Tests put a stand-in in ``KernelMachine``'s place.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from ds_hf.engine.ops import cuda_build
from ds_hf.engine.ops.cuda_build import Macros
from ds_hf.engine.ops.split_master import LOW

__all__ = [
    "COUNTERS",
    "Call",
    "Counters",
    "Gpu",
    "KernelMachine",
    "Tuning",
    "Tunings",
    "call_of",
    "dtype_number",
    "gpu",
    "grid_of",
    "machine_of",
    "macros_of",
    "new_table",
    "tables",
    "tunings_of",
]

# As in rules.cuh.
DECOUPLED, BIAS_CORRECTION, NESTEROV, FIRST, EPS_INSIDE = 1, 2, 4, 8, 16

PLACES = 5
COUNTERS = 1024  # as in lamb_fused.cu
NO_DTYPE = 3
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, LOW: 4}


@functools.cache
def table_type(capacity: int) -> type[Any]:
    """``struct Table`` of core.cuh, for up to ``capacity`` entries."""
    fields = (
        ("workspace", ctypes.c_uint64),
        ("scale_and_skip", ctypes.c_uint64),
        ("lr", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("scalars", ctypes.c_double * 8),
        ("tiles", ctypes.c_uint32),
        ("entries", ctypes.c_uint32),
        ("first_entry", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("extra", ctypes.c_uint32 * 4),
        ("steps", ctypes.c_uint64 * capacity),
        ("numel", ctypes.c_int64 * capacity),
        ("pointers", (ctypes.c_uint64 * capacity) * PLACES),
        ("first_tile", ctypes.c_uint32 * capacity),
        ("group_end", ctypes.c_uint32 * capacity),
    )
    return type("Table", (ctypes.Structure,), {"_fields_": fields})


@dataclass(frozen=True)
class Tuning:
    """How a kernel is shaped; core.cuh says what each number is.

    Attributes:
        waves: blocks launched, at most, over those that the GPU holds at once.
        capacity: entries of one launch; 60 fill the 4 KB of parameters that launches used to be limited to.
        held: tiles that LAMB keeps in registers.
    """

    threads: int = 256
    blocks: int = 3
    vec: int = 4
    groups: int = 2
    stream: int = 1
    waves: int = 1
    capacity: int = 60
    exact: int = 1
    held: int = 0

    def holding(self, entries: int) -> Tuning:
        """Itself, or for more entries than its capacity one with as many as 32 KB of parameters hold: CUDA 12.1."""
        return self if entries <= self.capacity else _with_large_table(self)

    @property
    def tile(self) -> int:
        """Elements of a tile."""
        return self.threads * self.vec * self.groups

    @property
    def macros(self) -> Macros:
        """What the kernel is compiled with."""
        numbers = (self.threads, self.blocks, self.vec, self.groups, self.stream, self.capacity, self.exact)
        names = ("DS_THREADS", "DS_BLOCKS", "DS_VEC", "DS_GROUPS", "DS_STREAM", "DS_CAPACITY", "DS_EXACT")
        return tuple(zip(names, numbers, strict=True))


@functools.cache
def _with_large_table(tuning: Tuning) -> Tuning:
    return replace(tuning, capacity=500)


@dataclass(frozen=True)
class Tunings:
    """One of each kind of kernel, the fastest of ``benchmarks/cuda_tunings.py``; ``vec`` of norms and sums is for fp32
    and doubles for 16 bits."""

    update: Tuning = Tuning(blocks=4, groups=1, waves=1000)  # a tile a block
    norm: Tuning = Tuning(threads=512, blocks=3, groups=4, stream=0)  # grads are read again soon
    sum: Tuning = Tuning(blocks=4, groups=1, waves=1000)
    lamb: Tuning = Tuning()
    lamb_fused: Tuning = Tuning(threads=1024, blocks=1, groups=1, exact=0, held=3)
    lamb_stream: Tuning = Tuning(threads=736, blocks=1, groups=1, exact=0, held=4)


def tunings_of(major: int) -> Tunings:
    """For GPUs of compute capability ``major``.x: LAMB holds as many tiles in registers as do not make others spill."""
    usual = Tunings()
    fused = replace(usual.lamb_fused, held=usual.lamb_fused.held if major == 9 else 0)
    stream = replace(usual.lamb_stream, held=usual.lamb_stream.held if major >= 9 else 1)
    return replace(usual, lamb_fused=fused, lamb_stream=stream)


@dataclass
class Counters:
    """Numbers by which the blocks of a launch count themselves; launches on one stream share them.

    Attributes:
        memory: int32 ``[2 * COUNTERS + 2 * messages]``; of the first ``COUNTERS`` each is 0 between launches.
        launch: not 0, and another for each launch.
    """

    memory: Tensor
    launch: int = 0

    @classmethod
    def with_messages(cls, messages: int, device: str) -> Counters:
        """New ones, with room for ``messages`` of core.cuh."""
        return cls(torch.zeros(2 * (COUNTERS + messages), dtype=torch.int32, device=device))

    @property
    def messages_at(self) -> int:
        """Address of the first message."""
        return self.memory.data_ptr() + 8 * COUNTERS

    @property
    def messages(self) -> int:
        """How many messages there is room for."""
        return len(self.memory) // 2 - COUNTERS

    def next(self) -> Counters:
        """For one more launch."""
        self.launch = self.launch % (2**32 - 1) + 1
        return self


class KernelMachine(Protocol):
    """What the operators need of a GPU.

    Attributes:
        multiprocessors: how many it has.
        tunings: of the kernels.
    """

    multiprocessors: int
    tunings: Tunings

    def kernel(self, source: str, name: str, macros: Macros) -> Any:
        """The function ``name`` of ``csrc/cuda/<source>``, compiled with ``macros``."""
        ...

    def launch(
        self,
        kernel: Any,
        grid: int,
        threads: int,
        arguments: Sequence[Any],
        shared_nbytes: int = 0,
        cooperative: bool = False,
        early: bool = False,
    ) -> None:
        """Queue ``kernel`` on the current stream; ``arguments`` are ctypes values.

        Args:
            cooperative: all blocks must be on the GPU at once.
            early: it may start before the kernel ahead of it has ended: it waits itself.
        """
        ...

    def starts_early(self) -> bool:
        """Whether launches on the current stream can be ``early``."""
        ...

    def counters(self, messages: int = 0) -> Counters:
        """For one launch on the current stream, with room for so many messages."""
        ...

    def resident(self, kernel: Any, threads: int, shared_nbytes: int) -> int:
        """How many blocks a multiprocessor holds at once; to be asked before a launch with shared memory."""
        ...

    @property
    def shared_nbytes(self) -> int:
        """Shared memory that the blocks of one multiprocessor can have together."""
        ...


def dtype_number(tensors: Sequence[Tensor]) -> int:
    """The number that core.cuh knows the dtype of ``tensors`` by, which have any shape."""
    return _DTYPES[tensors[0].dtype] if tensors else NO_DTYPE


@dataclass
class Call:
    """What all launches of one operator call have in common."""

    scalars: Sequence[float] = ()
    flags: int = 0
    scale_and_skip: Tensor | None = None
    rate: Tensor | None = None
    seed: int = 0
    steps: Sequence[Tensor] = ()


def call_of(
    lr: float | Tensor,
    scalars: tuple[float, ...],
    scale_and_skip: Tensor | None,
    steps: Sequence[Tensor] = (),
    seed: int | None = None,
    flags: int = 0,
) -> Call:
    """A ``Call`` whose first scalar is the rate, if it is a number and no 0-dim fp32 tensor."""
    rate = lr if isinstance(lr, Tensor) else None
    number = 0.0 if isinstance(lr, Tensor) else float(lr)
    return Call((number, *scalars), flags, scale_and_skip, rate, (seed or 0) & (2**64 - 1), steps)


@functools.cache
def macros_of(tuning: Tuning, own: Macros, dtypes: tuple[int, ...]) -> Macros:
    """What a kernel is compiled with: ``dtypes`` are those of param, grad, out and moments."""
    names = ("DS_PARAM", "DS_GRAD", "DS_OUT", "DS_FIRST", "DS_SECOND")
    return (*tuning.macros, *own, *zip(names, (*dtypes, NO_DTYPE, NO_DTYPE), strict=False))


def grid_of(machine: KernelMachine, tuning: Tuning, tiles: int) -> int:
    """Blocks of a launch over ``tiles``: as many as fit at once, and as there is work for."""
    return min(tiles, machine.multiprocessors * tuning.blocks * tuning.waves)


def tables(call: Call, places: Sequence[Sequence[Tensor]], tuning: Tuning) -> Iterator[Any]:
    """A filled table for each launch that is needed; none for entries without elements. Entries have any shape; the
    dtype is one in each of ``places``.

    Args:
        places: the lists of tensors as the kernel numbers them; an empty one is left out.
    """
    tile = tuning.tile
    for begin in range(0, len(places[0]), tuning.capacity):
        numels = list(map(_numel, places[0][begin : begin + tuning.capacity]))
        first = list(accumulate([(numel + tile - 1) // tile for numel in numels], initial=0))
        tiles, count = first.pop(), len(numels)
        if not tiles:
            continue
        table = new_table(call, tuning, tiles, count, begin)
        table.numel[:count], table.first_tile[:count] = numels, first
        for which, tensors in enumerate(places):
            if tensors:
                table.pointers[which][:count] = list(map(_data_ptr, tensors[begin : begin + count]))
        if call.steps:
            table.steps[:count] = list(map(_data_ptr, call.steps[begin : begin + count]))
        yield table


def new_table(call: Call, tuning: Tuning, tiles: int = 0, entries: int = 0, first_entry: int = 0) -> Any:
    """A table without its entries."""
    table = table_type(tuning.capacity)()
    scale_and_skip = 0 if call.scale_and_skip is None else call.scale_and_skip.data_ptr()
    rate = 0 if call.rate is None else call.rate.data_ptr()
    scalars = (*call.scalars, *_NO_SCALARS[len(call.scalars) :])
    _HEADER.pack_into(table, 0, 0, scale_and_skip, rate, call.seed, *scalars, tiles, entries, first_entry, call.flags)
    return table


_HEADER = struct.Struct("4Q8d4I")  # of a table, up to flags
_NO_SCALARS = (0.0,) * 8
_numel, _data_ptr = Tensor.numel, Tensor.data_ptr


@dataclass
class Gpu:
    """A CUDA device."""

    index: int
    tunings: Tunings = field(init=False)

    def __post_init__(self) -> None:
        properties = torch.cuda.get_device_properties(self.index)
        self.multiprocessors = int(properties.multi_processor_count)
        self.shared_nbytes = int(properties.shared_memory_per_multiprocessor)
        self.arch = f"sm_{properties.major}{properties.minor}"
        self.tunings = tunings_of(properties.major)
        self._driver: Any = importlib.import_module("cuda.bindings.driver")
        self._kernels: dict[tuple[str, str, Macros], Any] = {}
        self._resident: dict[tuple[int, int, int], int] = {}
        self._counters: dict[int, Counters] = {}
        self._overlaps = properties.major >= 9
        self._lock = threading.Lock()
        self._do(self._driver.cuInit(0))
        self._context = self._do(self._driver.cuDevicePrimaryCtxRetain(self._do(self._driver.cuDeviceGet(self.index))))

    def kernel(self, source: str, name: str, macros: Macros) -> Any:
        found = self._kernels.get((source, name, macros))
        if found is None:
            with self._lock, self._current(), self._capture_allows():
                found = self._load(source, name, macros)
                self._kernels[source, name, macros] = found
        return found

    def launch(
        self,
        kernel: Any,
        grid: int,
        threads: int,
        arguments: Sequence[Any],
        shared_nbytes: int = 0,
        cooperative: bool = False,
        early: bool = False,
    ) -> None:
        driver = self._driver
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        at, stream = ctypes.addressof(pointers), torch._C._cuda_getCurrentRawStream(self.index)
        shape = (grid, 1, 1, threads, 1, 1, shared_nbytes, stream, at)
        with self._current():
            for attempt in range(2):
                if cooperative:
                    (error,) = driver.cuLaunchCooperativeKernel(kernel, *shape)
                elif early:
                    (error,) = driver.cuLaunchKernelEx(self._early(grid, threads, stream), kernel, at, 0)
                else:
                    (error,) = driver.cuLaunchKernel(kernel, *shape, 0)
                if error != driver.CUresult.CUDA_ERROR_INVALID_CONTEXT or attempt:
                    break
                self._do(driver.cuCtxSetCurrent(self._context))  # a thread that has not used CUDA before
            if error:
                self._do((error,))

    def _early(self, grid: int, threads: int, stream: int) -> Any:
        driver = self._driver
        attribute, config = driver.CUlaunchAttribute(), driver.CUlaunchConfig()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.hStream, config.attrs, config.numAttrs = stream, [attribute], 1
        return config

    def starts_early(self) -> bool:
        return self._overlaps and not torch.cuda.is_current_stream_capturing()

    def counters(self, messages: int = 0) -> Counters:
        device = f"cuda:{self.index}"
        if torch.cuda.is_current_stream_capturing():  # graphs captured on one stream may be replayed on two
            return Counters.with_messages(messages, device).next()
        stream = torch._C._cuda_getCurrentRawStream(self.index)
        if stream not in self._counters or self._counters[stream].messages < messages:
            self._counters[stream] = Counters.with_messages(max(messages, 1 << 14), device)
        return self._counters[stream].next()

    def resident(self, kernel: Any, threads: int, shared_nbytes: int) -> int:
        key = (int(kernel), threads, shared_nbytes)
        if key not in self._resident:
            driver, attribute = self._driver, self._driver.CUfunction_attribute
            with self._current(), self._capture_allows():
                limit = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                self._do(driver.cuFuncSetAttribute(kernel, limit, shared_nbytes))
                carveout = attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
                self._do(driver.cuFuncSetAttribute(kernel, carveout, 100))  # per cent
                count = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(kernel, threads, shared_nbytes)
                self._resident[key] = int(self._do(count))
        return self._resident[key]

    def _load(self, source: str, name: str, macros: Macros) -> Any:
        driver = self._driver
        self._do(driver.cuCtxSetCurrent(self._context))
        code = cuda_build.cubin(cuda_build.program_text(source, macros), self.arch)
        library = self._do(driver.cuLibraryLoadData(code, None, None, 0, None, None, 0))
        # Of this context, and loaded now: at its first launch it might be in the middle of a graph's capture.
        return self._do(driver.cuKernelGetFunction(self._do(driver.cuLibraryGetKernel(library, name.encode()))))

    def _current(self) -> contextlib.AbstractContextManager[Any]:
        if torch.cuda.current_device() == self.index:
            return contextlib.nullcontext()
        return torch.cuda.device(self.index)

    @contextlib.contextmanager
    def _capture_allows(self) -> Iterator[None]:
        """Loading is safe during a capture, but its default mode forbids whatever may synchronize."""
        driver = self._driver
        relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        before = self._do(driver.cuThreadExchangeStreamCaptureMode(relaxed))
        try:
            yield
        finally:
            self._do(driver.cuThreadExchangeStreamCaptureMode(before))

    def _do(self, result: tuple[Any, ...]) -> Any:
        """The value that a call of the driver returns after its status.

        Raises:
            RuntimeError: it failed.
        """
        error, *values = result
        if error:
            _, name = self._driver.cuGetErrorName(error)
            text = name.decode() if isinstance(name, bytes) else str(error)
            raise RuntimeError(f"the CUDA driver answered {text} to a kernel of ds_hf on cuda:{self.index}")
        return values[0] if values else None


@functools.cache
def gpu(index: int) -> Gpu:
    """The ``Gpu`` of a device, made at its first use."""
    return Gpu(index)


def machine_of(tensor: Tensor) -> KernelMachine:
    """Where ``tensor`` lies, any tensor."""
    return gpu(tensor.get_device())
