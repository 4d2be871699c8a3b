"""The module that DeepSpeed's ``AsyncIOBuilder().load()`` gives: ``aio_handle`` and its functions, over ``aio.Aio``.

Buffers are tensors of any dtype, contiguous, in host memory or on a device (which goes over host memory). Counts are of
requests, as in DeepSpeed. Where DeepSpeed ends the process or returns a number for a fault, an ``OffloadError`` names
the file.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ds_hf.engine.offload.aio import Aio, FileRequest
from ds_hf.engine.offload.memory import PAGE, host_empty

__all__ = ["aio_handle", "aio_read", "aio_write", "deepspeed_memcpy"]

_File = str | Path | int


class aio_handle:  # noqa: N801  DeepSpeed's spelling
    """Reads and writes tensors, at once or beside everything else (DeepSpeed's ``aio_handle``).

    Args:
        block_size: bytes in one transfer.
        queue_depth: transfers in flight, for each thread.
        single_submit, overlap_events: accepted; transfers are always submitted as others complete.
        intra_op_parallelism: threads.
    """

    def __init__(
        self,
        block_size: int = 1 << 20,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        self._settings = (block_size, queue_depth, single_submit, overlap_events, intra_op_parallelism)
        self._aio = Aio(block=block_size, depth=queue_depth, threads=intra_op_parallelism)
        self._begun: list[tuple[FileRequest, Tensor | None, Tensor]] = []
        self._locked: list[Tensor] = []

    def get_block_size(self) -> int:
        """Bytes in one transfer."""
        return self._settings[0]

    def get_queue_depth(self) -> int:
        """Transfers in flight, for each thread."""
        return self._settings[1]

    def get_single_submit(self) -> bool:
        """As given."""
        return self._settings[2]

    def get_overlap_events(self) -> bool:
        """As given."""
        return self._settings[3]

    def get_intra_op_parallelism(self) -> int:
        """Threads."""
        return self._settings[4]

    def get_alignment(self) -> int:
        """Bytes to which buffers are best aligned."""
        return PAGE

    def async_pread(self, buffer: Tensor, filename: _File, file_offset: int = 0) -> int:
        """Begin to fill ``buffer``; 0."""
        memory = _host(buffer)
        request = self._aio.read(_path(filename), memory, file_offset)
        self._begun.append((request, memory if memory is not buffer else None, buffer))
        return 0

    def async_pwrite(
        self, buffer: Tensor, filename: _File | None = None, file_offset: int = 0, *, fd: int | None = None
    ) -> int:
        """Begin to write ``buffer``; 0. A number for ``filename``, or ``fd``, is a file that is open.

        Raises:
            TypeError: both are given, or neither.
        """
        if (filename is None) == (fd is None):
            raise TypeError("async_pwrite() takes a filename or an fd")
        filename = fd if filename is None else filename
        assert filename is not None
        memory = _host(buffer)
        if memory is not buffer:
            memory.copy_(buffer)
        if isinstance(filename, int):
            request = self._aio.write_open(filename, memory, file_offset)
        else:
            request = self._aio.write(filename, memory, file_offset)
        self._begun.append((request, None, buffer))
        return 0

    def wait(self) -> int:
        """Return when everything that was begun is done: how many requests that was.

        Raises:
            OffloadError: one of them failed; the others are done all the same.
        """
        begun, self._begun = self._begun, []
        fault: Exception | None = None
        for request, memory, buffer in begun:
            try:
                request.wait()
            except RuntimeError as error:
                fault = fault or error
                continue
            if memory is not None:
                buffer.copy_(memory)
        if fault is not None:
            raise fault
        return len(begun)

    def sync_pread(self, buffer: Tensor, filename: _File, file_offset: int = 0) -> int:
        """Fill ``buffer``; 1."""
        self.async_pread(buffer, filename, file_offset)
        return self._wait_for_last()

    def sync_pwrite(self, buffer: Tensor, filename: _File, file_offset: int = 0) -> int:
        """Write ``buffer``; 1."""
        self.async_pwrite(buffer, filename, file_offset)
        return self._wait_for_last()

    def _wait_for_last(self) -> int:
        before, self._begun = self._begun[:-1], self._begun[-1:]
        try:
            return self.wait()
        finally:
            self._begun = before

    def pread(self, buffer: Tensor, filename: _File, validate: bool, async_: bool, file_offset: int = 0) -> int:
        """``async_pread`` or ``sync_pread``; a file that is too short is a fault, ``validate`` or not."""
        return (self.async_pread if async_ else self.sync_pread)(buffer, filename, file_offset)

    def pwrite(self, buffer: Tensor, filename: _File, validate: bool, async_: bool, file_offset: int = 0) -> int:
        """``async_pwrite`` or ``sync_pwrite``."""
        return (self.async_pwrite if async_ else self.sync_pwrite)(buffer, filename, file_offset)

    def read(self, buffer: Tensor, filename: _File, validate: bool = False, file_offset: int = 0) -> int:
        """``sync_pread``."""
        return self.sync_pread(buffer, filename, file_offset)

    def write(self, buffer: Tensor, filename: _File, validate: bool = False, file_offset: int = 0) -> int:
        """``sync_pwrite``."""
        return self.sync_pwrite(buffer, filename, file_offset)

    def is_pinned(self, buffer: Tensor) -> bool:
        """Whether transfers need no memory between: it is aligned host memory."""
        return _host(buffer) is buffer and buffer.data_ptr() % PAGE == 0

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: Tensor) -> Tensor:
        """Aligned host memory, page-locked for CUDA, with the dtype of ``example_tensor``."""
        made = host_empty(num_elem, example_tensor.dtype, pinned=True)
        self._locked.append(made)
        return made

    def free_cpu_locked_tensor(self, tensor: Tensor) -> bool:
        """Forget a tensor of ``new_cpu_locked_tensor``; whether it was one."""
        kept = [other for other in self._locked if other.data_ptr() != tensor.data_ptr()]
        found, self._locked = len(kept) < len(self._locked), kept
        return found


def aio_read(
    buffer: Tensor,
    filename: str,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """Fill ``buffer`` from the beginning of a file; 1."""
    return aio_handle(block_size, queue_depth, single_submit, overlap_events).sync_pread(buffer, filename)


def aio_write(
    buffer: Tensor,
    filename: str,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """Write ``buffer`` to the beginning of a file; 1."""
    return aio_handle(block_size, queue_depth, single_submit, overlap_events).sync_pwrite(buffer, filename)


def deepspeed_memcpy(dest: Tensor, src: Tensor) -> int:
    """Copy ``src`` to ``dest``; 0."""
    with torch.no_grad():
        dest.copy_(src)
    return 0


def _host(buffer: Tensor) -> Tensor:
    if buffer.device.type == "cpu" and buffer.is_contiguous():
        return buffer
    return host_empty(buffer.numel(), buffer.dtype, pinned=True).view(buffer.shape)


def _path(filename: _File) -> str:
    return f"/proc/self/fd/{filename}" if isinstance(filename, int) else str(filename)
