"""Host memory for model states: page-aligned, of exactly the size asked for, page-locked where a GPU copies from it.

torch's own pinned allocator rounds each request up to a power of two, which for large units is up to twice the memory;
unaligned memory cannot be read into with O_DIRECT. A tensor made here owns its pages and gives them back with its last
view.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from typing import Any

import torch
from torch import Tensor

from ds_hf import host
from ds_hf.errors import OffloadError
from ds_hf.log import warn_once

__all__ = ["PAGE", "host_copy", "host_empty", "require_host_memory", "round_up"]

PAGE = 4096  # bytes; what O_DIRECT needs at most


def round_up(nbytes: int, multiple: int = PAGE) -> int:
    """The next multiple."""
    return -(-nbytes // multiple) * multiple


def require_host_memory(nbytes: int, what: str) -> None:
    """Say it now if the host will not do: the kernel would end the process without a word when it uses the memory.

    Raises:
        OffloadError: this process alone needs more than there is. Processes of one host that need more together get a
            warning, for those that were here before may have taken theirs already.
    """
    available, here = host.available_memory(), host.local_world_size()
    if nbytes > available:
        raise OffloadError(
            f"{what} need {nbytes / 2**30:.1f} GiB of host memory, and {available / 2**30:.1f} GiB are available: use "
            "shorter sequences, smaller micro-batches or fewer processes a host"
        )
    if nbytes * here > available:
        warn_once(
            f"{what} need {nbytes / 2**30:.1f} GiB of host memory for each of {here} processes here, and "
            f"{available / 2**30:.1f} GiB are available"
        )


class _Pages(mmap.mmap):
    """Anonymous memory, registered with CUDA on demand."""

    registered_at: tuple[int, int] | None = None  # address and process

    def __del__(self) -> None:
        # Before the pages are unmapped; a forked child has neither the registration nor, at exit, perhaps modules.
        if self.registered_at is not None and os.getpid() == self.registered_at[1]:
            with contextlib.suppress(Exception):
                torch.cuda.synchronize()  # a copy that was not waited for may still use the pages
                _runtime().cudaHostUnregister(self.registered_at[0])
            self.registered_at = None


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def host_empty(numel: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
    """``[numel]``, zeros, aligned to pages.

    Args:
        pinned: page-lock it for a CUDA device; nothing happens where there is none.

    Raises:
        OffloadError: there is not that much memory, or it may not be locked.
    """
    nbytes = round_up(max(numel * dtype.itemsize, 1))
    try:
        pages = _Pages(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise OffloadError(
            f"no {nbytes / 2**30:.1f} GiB of host memory for offload ({error}): use fewer processes a host or NVMe"
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(pages, dtype=torch.uint8)
    if pinned and torch.cuda.is_available():
        _lock(pages, whole.data_ptr(), nbytes)
    return whole[: numel * dtype.itemsize].view(dtype)


def _lock(pages: _Pages, address: int, nbytes: int) -> None:
    status = _runtime().cudaHostRegister(address, nbytes, 0)
    if int(status) != 0:
        raise OffloadError(
            f"{nbytes / 2**30:.1f} GiB of host memory cannot be page-locked (CUDA error {int(status)}): raise "
            '`ulimit -l`, or set "pin_memory": false in offload_optimizer and offload_param'
        )
    pages.registered_at = (address, os.getpid())
    with contextlib.suppress(OSError):
        pages.madvise(mmap.MADV_DONTFORK)  # workers of data loaders must not double it page by page


def host_copy(values: Tensor, dtype: torch.dtype, *, pinned: bool) -> Tensor:
    """The values in such memory, flat."""
    made = host_empty(values.numel(), dtype, pinned=pinned)
    made.copy_(values.reshape(-1))
    return made
