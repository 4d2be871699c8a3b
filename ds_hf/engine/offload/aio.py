"""Reading and writing files beside everything else: the library that ``csrc/aio`` becomes, through ctypes.

Owns the mirror of ``csrc/aio/ds_hf_aio.h`` and the words for what can go wrong with a file. io_uring is used where the
kernel has it, else threads; O_DIRECT where memory, offset and file system allow it. ctypes releases the GIL while a
call waits.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import weakref
from ctypes import POINTER, byref, c_char_p, c_int32, c_int64, c_void_p
from pathlib import Path

from torch import Tensor

from ds_hf.engine.events import Waits, told
from ds_hf.engine.ops.cpu import FOLDER, REPORT
from ds_hf.errors import OffloadError

__all__ = ["Aio", "FileRequest", "available"]

ABI = 1
LIBRARY = "libds_hf_aio.so"
_BEST, _THREADS = 0, 1
_OPEN, _TRANSFER, _SHORT = 1, 2, 3
_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


class _Options(ctypes.Structure):
    _fields_ = (
        ("nbytes", c_int64),
        ("block", c_int64),
        *((name, c_int32) for name in ("depth", "threads", "engine", "direct")),
    )


class _Result(ctypes.Structure):
    _fields_ = (("moved", c_int64), *((name, c_int32) for name in ("stage", "error", "direct", "pad")))


def available() -> str | None:
    """``None`` if files can be read and written this way, else why not."""
    found = _library()
    return found if isinstance(found, str) else None


class FileRequest:
    """One stretch of memory on its way to or from a file. The memory stays as long as this does.

    Attributes:
        direct: whether O_DIRECT was used; known after ``wait``.
    """

    waits: Waits | None = None

    def __init__(self, aio: Aio, number: int, memory: Tensor, path: str, *, write: bool) -> None:
        self._aio, self._number, self._memory = aio, number, memory
        self._path, self._write = path, write
        self._over = False
        self.direct = False

    @property
    def done(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self._over or bool(self._aio.library.ds_hf_aio_done(self._aio.handle, self._number))

    @told
    def wait(self) -> int:
        """Return the number of bytes moved, all of them.

        Raises:
            OffloadError: the file is missing, too short, or cannot be written; it is named.
        """
        nbytes = self._memory.numel() * self._memory.element_size()
        if self._over:
            return nbytes
        self._over = True
        result = _Result()
        self._aio.library.ds_hf_aio_wait(self._aio.handle, self._number, byref(result))
        self.direct = bool(result.direct)
        if result.stage:
            raise OffloadError(_fault(self._path, result, nbytes, write=self._write))
        return nbytes


def _fault(path: str, result: _Result, nbytes: int, *, write: bool) -> str:
    reason = os.strerror(result.error) if result.error else ""
    if result.stage == _SHORT:
        return f"{path} ends after {result.moved} of {nbytes} bytes: it was cut off by something else"
    if result.stage == _OPEN and result.error == errno.ENOENT and not write:
        return f"{path} is gone: something removed it while it was in use"
    if write and result.error in _FULL:
        return f"{path} cannot take {nbytes / 2**20:.1f} MiB ({reason}): free space on its disk, or choose another"
    what = "opened" if result.stage == _OPEN else "written" if write else "read"
    return f"{path} cannot be {what}: {reason}"


class Aio:
    """A queue of requests and its threads.

    ``close()`` finishes what was begun and ends the threads; so does the garbage collector.

    Args:
        block: bytes in one transfer.
        depth: transfers in flight, for each thread.
        threads: each with a ring of its own, where there is io_uring.
        uring: use it where the kernel has it.
        direct: use O_DIRECT where it can be.

    Raises:
        OffloadError: there is no library, or no thread.
    """

    def __init__(
        self, *, block: int = 1 << 20, depth: int = 8, threads: int = 1, uring: bool = True, direct: bool = True
    ) -> None:
        library = _library()
        if isinstance(library, str):
            raise OffloadError(f"asynchronous file access is not available: {library}")
        self.library = library
        options = _Options(ctypes.sizeof(_Options), block, depth, threads, _BEST if uring else _THREADS, direct)
        self.handle = library.ds_hf_aio_open(byref(options))
        if not self.handle:
            raise OffloadError(f"no threads for file access: {os.strerror(ctypes.get_errno())}")
        self.close = weakref.finalize(self, _close, library, self.handle, os.getpid())

    @property
    def uses_uring(self) -> bool:
        return bool(self.library.ds_hf_aio_uses_uring(self.handle))

    def read(self, path: str | Path, memory: Tensor, offset: int = 0) -> FileRequest:
        """Begin to fill ``memory`` (contiguous, on the host) from a file."""
        return self._submit(str(path), memory, offset, write=False)

    def write(self, path: str | Path, memory: Tensor, offset: int = 0) -> FileRequest:
        """Begin to write ``memory`` (contiguous, on the host) into a file, made if it is not there."""
        return self._submit(str(path), memory, offset, write=True)

    def write_open(self, file: int, memory: Tensor, offset: int = 0) -> FileRequest:
        """The same into a file that is open; without O_DIRECT, unless it was opened with it."""
        return self._submit(f"file descriptor {file}", memory, offset, write=True, file=file)

    def _submit(self, path: str, memory: Tensor, offset: int, *, write: bool, file: int = -1) -> FileRequest:
        if memory.device.type != "cpu" or not memory.is_contiguous():
            raise ValueError(f"files are read into and written from contiguous host memory, not {memory.device}")
        name = os.fsencode(path) if file < 0 else None
        nbytes = memory.numel() * memory.element_size()
        number = self.library.ds_hf_aio_submit(self.handle, write, name, file, memory.data_ptr(), nbytes, offset)
        if number == 0:
            raise OffloadError(f"not enough memory for a request on {path}")
        return FileRequest(self, number, memory, path, write=write)


def _close(library: ctypes.CDLL, handle: int, owner: int) -> None:
    """Finish what was begun, end the threads; a forked child has none."""
    if os.getpid() == owner:
        library.ds_hf_aio_close(handle)


@functools.cache
def _library() -> ctypes.CDLL | str:
    path = FOLDER / LIBRARY
    if not path.exists():
        try:
            reason = (FOLDER / REPORT).read_text(encoding="utf-8").splitlines()[0]
        except (OSError, IndexError):
            reason = "ds_hf was not installed: pip install it, or run make setup in a checkout"
        return f"{path} does not exist ({reason})"
    try:
        library = ctypes.CDLL(str(path), use_errno=True)
        found = library.ds_hf_aio_abi()
    except (OSError, AttributeError) as error:
        return f"{path} cannot be loaded ({error}): reinstall ds_hf"
    if found != ABI:
        return f"{path} belongs to another version of ds_hf (interface {found}, not {ABI}): reinstall ds_hf"
    library.ds_hf_aio_open.restype = c_void_p
    library.ds_hf_aio_open.argtypes = [POINTER(_Options)]
    library.ds_hf_aio_uses_uring.argtypes = [c_void_p]
    library.ds_hf_aio_submit.restype = c_int64
    library.ds_hf_aio_submit.argtypes = [c_void_p, c_int32, c_char_p, c_int32, c_void_p, c_int64, c_int64]
    library.ds_hf_aio_done.argtypes = [c_void_p, c_int64]
    library.ds_hf_aio_wait.argtypes = [c_void_p, c_int64, POINTER(_Result)]
    library.ds_hf_aio_close.argtypes = [c_void_p]
    library.ds_hf_aio_close.restype = None
    return library
