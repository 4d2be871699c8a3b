"""Opening files whose paths users give: regular files and nothing else.

A pipe without a writer would be waited for, a device such as /dev/zero never ends. Invariant: opening never waits, and
what is opened is what was looked at.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO

__all__ = ["TEXT_NBYTES", "check_regular", "open_regular", "read_regular"]

TEXT_NBYTES = 2**26  # that a file may have which people write

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """A file for reading; a link is followed.

    Raises:
        OSError: it cannot be opened, or is a folder, a pipe, a device or a socket.
    """
    check_regular(path)  # opening a device may do something to it
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # what became a pipe since opens at once
    try:
        _check_mode(os.fstat(descriptor).st_mode, path)
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def check_regular(path: str | os.PathLike[str]) -> int:
    """Size in bytes of a file that a library is going to open by its path.

    Raises:
        OSError: as ``open_regular``, but for rights.
    """
    status = os.stat(path)
    _check_mode(status.st_mode, path)
    return status.st_size


def read_regular(path: str | os.PathLike[str], most: int | None = None) -> bytes:
    """The content of a file, of at most ``most`` bytes.

    Raises:
        OSError: as ``open_regular``, or it is larger.
    """
    with open_regular(path) as file:
        nbytes = os.fstat(file.fileno()).st_size
        if most is not None and nbytes > most:
            raise OSError(errno.EFBIG, f"it has {nbytes} bytes where at most {most} are expected", os.fspath(path))
        content = bytearray()
        while part := file.read(2**20):  # not as many bytes as it says: files of /proc say 0
            content += part
            if most is not None and len(content) > most:
                raise OSError(errno.EFBIG, f"it grew beyond {most} bytes", os.fspath(path))
        return bytes(content)


def _check_mode(mode: int, path: str | os.PathLike[str]) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise OSError(errno.EINVAL, f"not a regular file but {kind}", os.fspath(path))
