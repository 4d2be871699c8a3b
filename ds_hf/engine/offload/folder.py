"""The folder in which one process keeps offloaded states, and what is known of its disk before training starts.

Its files are of no use to another process: it is removed when the engine is destroyed, when Python exits, and, after a
kill, by the next run that offloads to the same place. A lock on a file in it tells living owners from dead ones.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import time
import uuid
import weakref
from dataclasses import dataclass
from pathlib import Path

import torch

from ds_hf.engine.offload.aio import Aio
from ds_hf.engine.offload.memory import host_empty
from ds_hf.errors import OffloadError

__all__ = ["Disk", "SwapFolder", "examine"]

_PREFIX = "ds_hf_offload_"
_LOCK = "owner.lock"
_TRIAL_NBYTES = 64 << 20


class SwapFolder:
    """A new folder of this process, under ``root``.

    Raises:
        OffloadError: nothing can be made there.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        name = f"{_PREFIX}{socket.gethostname()}_{os.getpid()}_{uuid.uuid4().hex[:8]}"
        self.path = self.root / name
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            _remove_left_over(self.root)
            # Locked before it has its name: found there unlocked, its owner is dead.
            unnamed = self.root / f".{name}"
            lock = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with contextlib.suppress(OSError):  # a file system without locks: what a kill leaves stays
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.path.mkdir(mode=0o700)
            unnamed.rename(self.path / _LOCK)
        except OSError as error:
            raise OffloadError(
                f"nvme_path {self.root} cannot be used ({error.strerror}): it must be a folder that can be written to"
            ) from error
        self.close = weakref.finalize(self, _remove, self.path, lock, os.getpid())


def _remove(path: Path, lock: int, owner: int) -> None:
    if os.getpid() != owner:  # a forked child that exits
        return
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.close(lock)


def _remove_left_over(root: Path) -> None:
    """Folders whose owners are dead."""
    for path in root.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


@dataclass(frozen=True)
class Disk:
    """What a trial showed.

    Attributes:
        free: bytes.
        read, write: bytes a second.
        direct: whether O_DIRECT works.
        uring: whether io_uring is used.
    """

    free: int
    read: float
    write: float
    direct: bool
    uring: bool

    def __str__(self) -> str:
        how = f"{'O_DIRECT' if self.direct else 'no O_DIRECT'}, {'io_uring' if self.uring else 'threads'}"
        rates = f"writes {self.write / 1e9:.2f} GB/s, reads {self.read / 1e9:.2f} GB/s"
        return f"{self.free / 2**30:.1f} GiB free, {how}, {rates}"


def examine(folder: SwapFolder, aio: Aio, needed: int, processes: int) -> Disk:
    """Try the disk.

    Args:
        needed: bytes that this process will keep in the folder.
        processes: of this host, each of which needs as much on the same disk.

    Raises:
        OffloadError: it has not that much space, or cannot be written to.
    """
    free = shutil.disk_usage(folder.path).free
    if needed * processes > free:
        raise OffloadError(
            f"nvme_path {folder.root} has {free / 2**30:.1f} GiB free, and offload needs "
            f"{needed * processes / 2**30:.1f} GiB there (processes of this host: {processes}): free space, choose "
            "another disk, or offload less"
        )
    nbytes = min(_TRIAL_NBYTES, max(1 << 20, needed))
    memory = host_empty(nbytes, torch.uint8, pinned=False)
    memory.fill_(1)
    path = folder.path / "trial"
    started = time.perf_counter()
    request = aio.write(path, memory)
    request.wait()
    wrote = time.perf_counter()
    aio.read(path, memory).wait()
    ended = time.perf_counter()
    path.unlink()
    rates = nbytes / max(ended - wrote, 1e-9), nbytes / max(wrote - started, 1e-9)
    return Disk(free, *rates, direct=request.direct, uring=aio.uses_uring)
