"""Folders that are being written: who writes one, whether he lives, and making durable what was written."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import os
import re
import socket
import time
import uuid
from pathlib import Path

from ds_hf.errors import CheckpointPlaceError

__all__ = ["LEFT_ALONE_S", "FolderHold", "boot_of", "make_folder", "sync", "this_writer", "untouched"]

LEFT_ALONE_S = 600.0  # what another machine's process staged is abandoned if it was not written to for so long
_UNNAMED = ".held"


class FolderHold:
    """A folder that is being written: as long as this process lives, others see that its writer does.

    Args:
        made: make the folder. It has its name only once it is held: found unheld, its writer is dead.
    """

    def __init__(self, folder: Path, *, made: bool = False) -> None:
        self._descriptor = -1
        if not made:
            self._take(folder)
            return
        for attempt in itertools.count():
            place = folder.with_name(f".{uuid.uuid4().hex[:12]}{_UNNAMED}")
            place.mkdir()
            try:
                self._take(place)
                os.rename(place, folder)
                return
            except FileNotFoundError:  # another took it for one that a killed process has left
                self.close()
                if attempt == 9:
                    raise

    def _take(self, place: Path) -> None:
        self._descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # a file system without such locks: others look at the process and times
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    @staticmethod
    def remove_unnamed(folder: Path) -> None:
        """Remove what processes have left that were killed before they had named the folder they made."""
        for path in folder.glob(f".*{_UNNAMED}"):
            if FolderHold.lives(path) is not True:
                with contextlib.suppress(OSError):
                    path.rmdir()

    @staticmethod
    def lives(folder: Path) -> bool | None:
        """Whether a process holds the folder; ``None`` where that cannot be told."""
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            return True
        except OSError:
            return None
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Let go."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):  # children that were forked meanwhile have the same lock
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, so that their names survive a crash of the machine.

    Raises:
        CheckpointPlaceError: one of them is a file.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        inside = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
        raise CheckpointPlaceError(f"{inside} is no folder: give another place, or move it away") from None
    for path in reversed(missing):
        sync(path.parent)


def this_writer() -> str:
    """Host, process, what was started (machine and process namespace), and a number of its own."""
    host = re.sub(r"\W", "_", socket.gethostname()) or "unknown"
    return f"{host}-{os.getpid()}-{boot_of()}_{uuid.uuid4().hex[:12]}"


def boot_of() -> str:
    """Which start of which machine this is, and which process namespace: in one, a process id is one process.

    The first eight digits are the machine's: processes that have them in common see each other's locks.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        space = os.readlink("/proc/self/ns/pid")
    except (OSError, ValueError):
        return "0" * 16
    return "".join(hashlib.sha256(text.encode()).hexdigest()[:8] for text in (boot, space))


def untouched(path: Path) -> bool:
    """Whether nothing was written into a folder for ``LEFT_ALONE_S``."""
    try:
        newest = max(file.stat().st_mtime for file in (path, *path.glob("*")))
    except OSError:  # it goes away just now
        return False
    return time.time() - newest > LEFT_ALONE_S


def sync(path: Path) -> None:
    """Make a file, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot sync a folder
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
