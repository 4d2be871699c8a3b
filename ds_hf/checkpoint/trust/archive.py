"""The archives that ``torch.save`` writes: zip files whose records are stored once each and uncompressed.

Invariant: Python's reader, which looks first, and torch's, which loads, see the same records; nothing is larger than
the file. An archive may be a part of a file, as in the folders of torch.distributed.checkpoint.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from typing import Any, BinaryIO

__all__ = ["Archive", "Refused", "Window"]

_END = struct.Struct("<4s4H2LH")  # end of central directory
_LOCAL = struct.Struct("<4s22xHH")  # header of a record
_LOCATOR = struct.Struct("<4sLQL")
_END64_NBYTES = 56
_READ = 2**20  # bytes


class Refused(Exception):
    """Why a file is not read."""


class Window(io.RawIOBase):
    """``nbytes`` bytes of a file from ``start`` on, as a file; the file stays open when this is closed."""

    def __init__(self, file: BinaryIO, start: int, nbytes: int) -> None:
        self._file, self._start, self._nbytes, self._place = file, start, nbytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._nbytes}[whence]
        self._place = max(0, origin + offset)
        return self._place

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self._nbytes - self._place)]
        self._file.seek(self._start + self._place)
        found = self._file.readinto(view) if len(view) else 0  # type: ignore[attr-defined]
        self._place += found
        return int(found)


class Archive:
    """An archive whose directory and records have been looked at.

    Attributes:
        folder: in which all records lie: the stem of the file's name where torch.save was given a path.
        nbytes: of the whole archive.
        sizes: of each record in bytes.
        summed: whether ``check_sums`` has found checksums and compared them.

    Raises:
        Refused: it is not as torch writes it.
    """

    def __init__(self, file: BinaryIO, nbytes: int) -> None:
        self.nbytes, self.summed, self._file = nbytes, False, file
        _check_ends(file, nbytes)
        with zipfile.ZipFile(file) as opened:
            self._records = _check_records(opened, nbytes)
        self.folder = next(iter(self._records)).partition("/")[0]
        self.sizes = {name: info.file_size for name, info in self._records.items()}

    def pickle(self) -> bytes:
        """The record that says what the file holds."""
        info = self._records.get(f"{self.folder}/data.pkl")
        if info is None:
            raise Refused("it has no record data.pkl")
        self._file.seek(_start_of(self._file, info))
        content: bytes = self._file.read(info.file_size)
        return content

    def check_sums(self) -> None:
        """Compare the records' checksums; ``torch.serialization.set_crc32_options(False)`` leaves them out.

        Raises:
            Refused: a record is damaged.
        """
        damaged = []
        for name, info in self._records.items():
            self._file.seek(_start_of(self._file, info))
            found, left = 0, info.file_size
            while left and (part := self._file.read(min(left, _READ))):
                found, left = zlib.crc32(part, found), left - len(part)
            if left or found != info.CRC:
                damaged.append(name)
        if damaged and len(damaged) < len(self._records):
            raise Refused(f"its record {damaged[0]!r} is damaged")
        self.summed = not damaged


def _check_ends(file: BinaryIO, nbytes: int) -> None:
    """The archive's directory lies where it must, so that Python and torch see the same one."""
    tail_nbytes = _END.size + _LOCATOR.size + _END64_NBYTES
    file.seek(max(0, nbytes - tail_nbytes))
    tail = file.read(tail_nbytes)
    if len(tail) < _END.size:
        raise Refused("it is too short for an archive of torch.save")
    signature, _, _, _, _, directory_nbytes, start, comment = _END.unpack(tail[-_END.size :])
    if signature != b"PK\5\6" or comment:
        raise Refused("it does not end like an archive of torch.save")
    end = nbytes - _END.size
    locator = tail[: -_END.size][-_LOCATOR.size :]
    if locator[:4] == b"PK\6\7":
        end -= _LOCATOR.size + _END64_NBYTES
        if _LOCATOR.unpack(locator)[2] != end:
            raise Refused("its directory is not where it says")
        directory_nbytes, start = struct.unpack("<QQ", tail[40:_END64_NBYTES])
    if start + directory_nbytes != end:
        raise Refused("its directory is not where it says")


def _check_records(archive: zipfile.ZipFile, nbytes: int) -> dict[str, zipfile.ZipInfo]:
    """The records, which are stored once each, uncompressed."""
    records: dict[str, zipfile.ZipInfo] = {}
    for info in archive.infolist():
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size or info.flag_bits & 1:
            raise Refused(f"its record {info.filename!r} is compressed or encrypted")
        if info.filename in records:
            raise Refused(f"its record {info.filename!r} is there twice")
        records[info.filename] = info
    if not records or sum(info.file_size for info in records.values()) > nbytes:
        raise Refused("its records are larger than the file")
    if len({name.partition("/")[0] for name in records}) > 1:
        raise Refused("its records do not lie in one folder")
    return records


def _start_of(file: BinaryIO, info: zipfile.ZipInfo) -> int:
    """Where the bytes of a record begin, after its name and padding."""
    file.seek(info.header_offset)
    header = file.read(_LOCAL.size)
    signature, name_nbytes, extra_nbytes = _LOCAL.unpack(header) if len(header) == _LOCAL.size else (b"", 0, 0)
    if signature != b"PK\3\4":
        raise Refused(f"its record {info.filename!r} is not where its directory says")
    return int(info.header_offset + _LOCAL.size + name_nbytes + extra_nbytes)
