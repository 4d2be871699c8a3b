"""Opening files whose paths users give: regular files and nothing else; and writing where a stranger may have written.

A pipe without a writer would be waited for, a device such as /dev/zero never ends. Invariant: opening never waits, and
what is opened is what was looked at. What is replaced is the name: a link is not followed.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import uuid
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["TEXT_NBYTES", "check_regular", "open_regular", "read_object", "read_regular", "replace_file"]

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


def read_object(path: str | os.PathLike[str], most: int = TEXT_NBYTES) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        OSError: as ``read_regular``. ValueError: it holds something else.
    """
    try:
        found = json.loads(read_regular(path, most))
    except RecursionError:
        raise ValueError(f"{os.fspath(path)} is nested too deep") from None
    if not isinstance(found, dict):
        raise ValueError(f"{os.fspath(path)} holds a {type(found).__name__} and no object")
    return found


def replace_file(path: Path, text: str) -> None:
    """Write a file, or replace what has its name, even a link, at once. What UTF-8 has not (half a pair) is escaped.

    Raises:
        OSError: it cannot be written, or there is a folder of that name.
    """
    staged = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.new")
    try:
        with staged.open("x", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        os.replace(staged, path)
    finally:
        staged.unlink(missing_ok=True)


def _check_mode(mode: int, path: str | os.PathLike[str]) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise OSError(errno.EINVAL, f"not a regular file but {kind}", os.fspath(path))
