"""``get_accelerator()``: the device of this process under the method names that DeepSpeed's users and HF call.

Two implementations of one small surface, CUDA and CPU; which one is decided at the first call and kept. On the CPU
streams and events do nothing, and the figures of memory are those of the process.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
from typing_extensions import Self

from ds_hf import host
from ds_hf.deepspeed_api.op_builder import BUILDERS
from ds_hf.engine.comm.device import peak_resident_nbytes, resident_nbytes

__all__ = ["Accelerator", "CpuAccelerator", "CudaAccelerator", "get_accelerator", "is_current_accelerator_supported"]


class NullStream:
    """What stands for a stream where work is synchronous: a context manager that waits for nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def synchronize(self) -> None:
        """Everything queued has happened already."""

    def wait_stream(self, stream: object) -> None:
        """There is nothing to wait for."""

    def wait_event(self, event: object) -> None:
        """There is nothing to wait for."""

    def record_event(self, event: NullEvent | None = None) -> NullEvent:
        """Mark this moment."""
        marked = event or NullEvent()
        marked.record()
        return marked

    def query(self) -> bool:
        """Everything queued has happened already."""
        return True


class NullEvent:
    """What stands for an event where work is synchronous; it still measures time."""

    def __init__(self, enable_timing: bool = False, **_: object) -> None:
        self._at = 0.0

    def record(self, stream: object = None) -> None:
        """Mark this moment."""
        self._at = time.perf_counter()

    def wait(self, stream: object = None) -> None:
        """There is nothing to wait for."""

    def synchronize(self) -> None:
        """Everything queued has happened already."""

    def query(self) -> bool:
        """Everything queued has happened already."""
        return True

    def elapsed_time(self, end: NullEvent) -> float:
        """Milliseconds from this mark to ``end``."""
        return (end._at - self._at) * 1000.0


class Accelerator:
    """What CUDA and CPU answer alike; ``kind`` is torch's name of the device type."""

    kind: str = ""
    backend: str = ""

    def device_name(self, device_index: int | None = None) -> str:
        """``"cuda"`` or ``"cuda:1"``."""
        return self.kind if device_index is None else f"{self.kind}:{device_index}"

    @property
    def _name(self) -> str:
        """What scripts compare with ``"cuda"`` and ``"cpu"``."""
        return self.kind

    @property
    def _communication_backend_name(self) -> str:
        return self.backend

    def communication_backend_name(self) -> str:
        """The process-group backend of this device."""
        return self.backend

    def is_synchronized_device(self) -> bool:
        """Whether operations have finished when the call returns."""
        return self.kind == "cpu"

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies on a device of this kind."""
        return tensor.device.type == self.kind

    def supported_dtypes(self) -> list[torch.dtype]:
        """The dtypes that training takes here."""
        found = [torch.float32]
        if self.is_fp16_supported():
            found.append(torch.float16)
        if self.is_bf16_supported():
            found.append(torch.bfloat16)
        return found

    def pin_memory(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        """A page-locked copy where that means something; the tensor itself on the CPU.

        Args:
            make_copy: ``False``: page-locked memory of the same size, without the values.
            match_shape: ``False``, with ``make_copy`` ``False``: in one dimension.
        """
        if self.kind == "cpu":
            return tensor
        if make_copy:
            return tensor.pin_memory()
        return self.pin_empty(tensor.shape if match_shape else tensor.numel(), dtype=tensor.dtype)

    def unpin_memory(self, tensor: torch.Tensor) -> None:
        """Nothing to do: torch gives page-locked memory back with its last tensor."""

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is page-locked."""
        return tensor.is_pinned() if self.kind != "cpu" else False

    def manual_seed(self, seed: int) -> None:
        """Seed the generator of the current device."""
        self.manual_seed_all(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed the generators of all devices."""
        torch.manual_seed(seed)

    def initial_seed(self) -> int:
        """The seed of the current generator."""
        return torch.initial_seed()

    def is_fp16_supported(self) -> bool:
        """Whether fp16 training runs here."""
        return True

    def is_bf16_supported(self) -> bool:
        """Whether bf16 training runs here."""
        return True

    def is_fp64_supported(self) -> bool:
        """Whether fp64 runs here."""
        return True

    def is_triton_supported(self) -> bool:
        """Whether triton generates code for this device."""
        return self.kind == "cuda" and torch.cuda.get_device_capability() >= (7, 0)

    def use_host_timers(self) -> bool:
        """Whether the host's clock suffices to time operations."""
        return self.is_synchronized_device()

    def resolves_data_dependency(self) -> bool:
        """Whether the device orders operations by itself."""
        return self.is_synchronized_device()

    def handles_memory_backpressure(self) -> bool:
        """Whether queueing too much work waits by itself."""
        return self.is_synchronized_device()

    def communication_backend_version(self) -> Any:
        """The version of NCCL; None on the CPU."""
        return torch.cuda.nccl.version() if self.kind == "cuda" else None  # type: ignore[no-untyped-call]

    def amp(self) -> Any:
        """torch's module of automatic mixed precision for this device."""
        return torch.cuda.amp if self.kind == "cuda" else torch.cpu.amp

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        """Call now, or when CUDA is initialized."""
        return torch.cuda._lazy_call(callback) if self.kind == "cuda" else callback()  # type: ignore[no-untyped-call]

    def pin_empty(self, *shape: Any, **options: Any) -> torch.Tensor:
        """A new host tensor, page-locked where that means something."""
        return torch.empty(*shape, **options, pin_memory=self.kind != "cpu")

    def default_generator(self, device_index: int) -> torch.Generator:
        """The generator of the device."""
        return torch.cuda.default_generators[device_index] if self.kind == "cuda" else torch.default_generator

    def export_envs(self) -> list[str]:
        """Prefixes of the environment variables that every process of a run needs."""
        return ["NCCL", "LD_LIBRARY", "PATH"] if self.kind == "cuda" else []

    def set_visible_devices_envs(self, current_env: dict[str, str], local_accelerator_ids: Sequence[int]) -> None:
        """Write into ``current_env`` which devices a process may see."""
        for name in self.visible_devices_envs():
            current_env[name] = ",".join(map(str, local_accelerator_ids))

    def visible_devices_envs(self) -> list[str]:
        """Environment variables that choose the devices."""
        return []

    def get_compile_backend(self) -> str:
        """The backend that torch.compile takes here."""
        return "inductor"

    def create_op_builder(self, class_name: str) -> Any:
        """A builder of DeepSpeed by its class name; None for an unknown one."""
        builder = self.get_op_builder(class_name)
        return None if builder is None else builder()

    def get_op_builder(self, class_name: str) -> Any:
        """The class of a builder of DeepSpeed; None for an unknown one."""
        return BUILDERS.get(class_name)

    def __getattr__(self, name: str) -> Any:
        dtype = _TENSOR_TYPES.get(name)
        if dtype is None:
            raise AttributeError(
                f"get_accelerator() of ds_hf has no {name!r}; torch.{self.kind or 'accelerator'} may have what you need"
            )
        return functools.partial(_typed_tensor, dtype=dtype, device=self.kind)


def _typed_tensor(content: Any = (), *more: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """What the old constructors ``torch.cuda.FloatTensor(...)`` make: of values, or of a shape."""
    if isinstance(content, int):
        return torch.empty(content, *more, dtype=dtype, device=device)
    return torch.tensor(content, dtype=dtype, device=device)


_TENSOR_TYPES = {
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
}


class CudaAccelerator(Accelerator):
    """The CUDA device of this process; method by method torch.cuda."""

    kind = "cuda"
    backend = "nccl"

    Stream = torch.cuda.Stream
    Event = torch.cuda.Event

    def is_available(self) -> bool:
        """Whether there is a CUDA device."""
        return torch.cuda.is_available()

    def device_count(self) -> int:
        """Number of visible devices."""
        return torch.cuda.device_count()

    def device(self, device_index: int | None = None) -> Any:
        """Context manager that makes a device current."""
        return torch.cuda.device(device_index)

    def set_device(self, device_index: int) -> None:
        """Make a device current."""
        torch.cuda.set_device(device_index)

    def current_device(self) -> int:
        """Index of the current device."""
        return torch.cuda.current_device()

    def current_device_name(self) -> str:
        """``"cuda:<index>"``."""
        return f"cuda:{torch.cuda.current_device()}"

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait until the device is idle."""
        torch.cuda.synchronize(device_index)

    def stream(self, stream: torch.cuda.Stream) -> Any:
        """Context manager that makes a stream current."""
        return torch.cuda.stream(stream)

    def current_stream(self, device_index: int | None = None) -> torch.cuda.Stream:
        """The current stream."""
        return torch.cuda.current_stream(device_index)

    def default_stream(self, device_index: int | None = None) -> torch.cuda.Stream:
        """The default stream."""
        return torch.cuda.default_stream(device_index)

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """State of the device's generator."""
        return torch.cuda.get_rng_state("cuda" if device_index is None else device_index)

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """Restore the device's generator."""
        torch.cuda.set_rng_state(new_state, "cuda" if device_index is None else device_index)

    def random(self) -> Any:
        """The module that holds the generator functions."""
        return torch.cuda.random

    def manual_seed(self, seed: int) -> None:
        """Seed the generator of the current device."""
        torch.cuda.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed the generators of all devices."""
        torch.cuda.manual_seed_all(seed)

    def initial_seed(self) -> int:
        """The seed of the current generator."""
        return torch.cuda.initial_seed()

    def empty_cache(self) -> None:
        """Give cached blocks back."""
        torch.cuda.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes in tensors."""
        return torch.cuda.memory_allocated(device_index)

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Peak of bytes in tensors."""
        return torch.cuda.max_memory_allocated(device_index)

    def memory_reserved(self, device_index: int | None = None) -> int:
        """Bytes held by the allocator."""
        return torch.cuda.memory_reserved(device_index)

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        """Peak of bytes held by the allocator."""
        return torch.cuda.max_memory_reserved(device_index)

    memory_cached, max_memory_cached = memory_reserved, max_memory_reserved

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        """The allocator's own figures."""
        return torch.cuda.memory_stats(device_index)

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Start the peaks anew."""
        torch.cuda.reset_peak_memory_stats(device_index)

    def reset_max_memory_allocated(self, device_index: int | None = None) -> None:
        """Start the peaks anew."""
        torch.cuda.reset_peak_memory_stats(device_index)

    reset_max_memory_cached = reset_max_memory_allocated

    def is_current_stream_capturing(self) -> bool:
        """Whether a graph is being captured."""
        return bool(torch.cuda.is_current_stream_capturing())

    def create_graph(self) -> Any:
        """An empty graph."""
        return torch.cuda.CUDAGraph()

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> Any:
        """Context manager that records into ``graph``."""
        return torch.cuda.graph(graph, pool, stream)

    def replay_graph(self, graph: Any) -> None:
        """Run what was recorded."""
        graph.replay()

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes of the device."""
        return torch.cuda.mem_get_info(device_index)[1]

    def available_memory(self, device_index: int | None = None) -> int:
        """Bytes of the device that are free."""
        return torch.cuda.mem_get_info(device_index)[0]

    def is_bf16_supported(self) -> bool:
        """Whether the device computes in bf16."""
        return bool(torch.cuda.is_bf16_supported())

    def range_push(self, msg: str) -> None:
        """Open an NVTX range."""
        torch.cuda.nvtx.range_push(msg)  # type: ignore[no-untyped-call]

    def range_pop(self) -> None:
        """Close the innermost NVTX range."""
        torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]

    def visible_devices_envs(self) -> list[str]:
        """Environment variables that choose the devices."""
        return ["CUDA_VISIBLE_DEVICES"]


class CpuAccelerator(Accelerator):
    """The processor: synchronous, one device."""

    kind = "cpu"
    backend = "gloo"

    Stream = NullStream
    Event = NullEvent

    def is_available(self) -> bool:
        """There is always a processor."""
        return True

    def device_count(self) -> int:
        """The processes of this host (``LOCAL_SIZE``, which launchers set), each of which counts as a device; else 1.

        Raises:
            ValueError: ``LOCAL_SIZE`` is not a number.
        """
        text = os.environ.get("LOCAL_SIZE") or "1"
        if not text.strip().lstrip("-").isdecimal():
            raise ValueError(f"the environment variable LOCAL_SIZE is {text[:60]!r}: give a number of processes")
        return max(1, int(text))

    def device_name(self, device_index: int | None = None) -> str:
        """``"cpu"``, whatever the index."""
        return "cpu"

    def device(self, device_index: int | None = None) -> contextlib.AbstractContextManager[None]:
        """Context manager that changes nothing."""
        return contextlib.nullcontext()

    def set_device(self, device_index: int) -> None:
        """There is only one device."""

    def current_device(self) -> torch.device:
        """The CPU: what tensors are given as ``device``, for which an index names an accelerator."""
        return torch.device("cpu")

    def current_device_name(self) -> str:
        """``"cpu"``."""
        return "cpu"

    def synchronize(self, device_index: int | None = None) -> None:
        """Everything has happened already."""

    def stream(self, stream: NullStream | None) -> contextlib.AbstractContextManager[object]:
        """Context manager that changes nothing."""
        return stream if stream is not None else contextlib.nullcontext()

    def current_stream(self, device_index: int | None = None) -> NullStream:
        """The one stream there is."""
        return NullStream()

    def default_stream(self, device_index: int | None = None) -> NullStream:
        """The one stream there is."""
        return NullStream()

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """State of torch's generator."""
        return torch.get_rng_state()

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """Restore torch's generator."""
        torch.set_rng_state(new_state)

    def random(self) -> Any:
        """The module that holds the generator functions."""
        return torch.random

    def empty_cache(self) -> None:
        """The processor has no cache of blocks."""

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Resident bytes of this process."""
        return resident_nbytes()

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Peak of resident bytes since the process started."""
        return peak_resident_nbytes()

    def memory_reserved(self, device_index: int | None = None) -> int:
        """Resident bytes of this process."""
        return self.memory_allocated()

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        """Peak of resident bytes since the process started."""
        return self.max_memory_allocated()

    memory_cached, max_memory_cached = memory_reserved, max_memory_reserved

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        """The two figures there are."""
        return {
            "allocated_bytes.all.current": self.memory_allocated(),
            "allocated_bytes.all.peak": self.max_memory_allocated(),
        }

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """The system keeps the peak of a process for good."""

    def reset_max_memory_allocated(self, device_index: int | None = None) -> None:
        """The system keeps the peak of a process for good."""

    reset_max_memory_cached = reset_max_memory_allocated

    def is_current_stream_capturing(self) -> bool:
        """The processor captures no graphs."""
        return False

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes of the machine, or of the container."""
        return host.total_memory()

    def available_memory(self, device_index: int | None = None) -> int:
        """Bytes that are free or can be freed."""
        return host.available_memory()

    def range_push(self, msg: str) -> None:
        """No profiler listens on the processor."""

    def range_pop(self) -> None:
        """No profiler listens on the processor."""


@functools.cache
def get_accelerator() -> CudaAccelerator | CpuAccelerator:
    """The accelerator of this machine: CUDA when there is a device, the processor otherwise."""
    return CudaAccelerator() if torch.cuda.is_available() else CpuAccelerator()


def is_current_accelerator_supported() -> bool:
    """Whether training runs on this machine's device; both kinds that there are do."""
    return get_accelerator().device_name() in (CudaAccelerator.kind, CpuAccelerator.kind)
