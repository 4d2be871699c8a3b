"""Reading the pickled files of a checkpoint that may come from a stranger.

``torch.load(weights_only=True)`` runs no foreign code, but it believes figures: a storage may claim more elements than
the file has bytes, a record may be compressed a thousandfold, ``bytearray(10**12)`` is an allowed call. So a file is
first walked by an unpickler in which every name stands for an inert object; what it would allocate is compared with
what the file holds.

Invariant: after ``check_pickled`` the memory that loading takes is in proportion to the size of the file.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any, ClassVar

import torch

from ds_hf.errors import CheckpointError

__all__ = ["FrugalUnpickler", "check_pickled", "read_pickled"]

_END = struct.Struct("<4s4H2LH")  # end of central directory
_LOCAL = struct.Struct("<4s22xHH")  # header of a record
_LOCATOR = struct.Struct("<4sLQL")
_END64_NBYTES = 56
_EXPANDED = 2**26  # bytes that a tensor with strides of 0 may pretend to have, beyond the size of the file

_ITEMSIZES = {f"{name}Storage": itemsize for itemsize, names in {
    1: ("Untyped", "Byte", "Char", "Bool", "QInt8", "QUInt8", "QUInt4x2", "QUInt2x4"),
    2: ("Short", "Half", "BFloat16"),
    4: ("Int", "Float", "QInt32"),
    8: ("Long", "Double", "ComplexFloat"),
    16: ("ComplexDouble",),
}.items() for name in names}  # fmt: skip
_REBUILT = ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_qtensor")


class _Refused(Exception):
    """Why a file is not read."""


def read_pickled(path: Path) -> dict[str, Any]:
    """The content of a file that ``torch.save`` wrote.

    Raises:
        CheckpointError: it is damaged, would run code, or claims more than it has.
    """
    check_pickled(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged files make torch raise anything
        raise CheckpointError(f"{path} cannot be read: {_first_line(error)}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__} instead of a dict")
    return content


def check_pickled(path: Path, *, sums: bool = True) -> None:
    """Raise ``CheckpointError`` unless ``path`` is an archive of ``torch.save`` whose figures are true.

    Args:
        sums: compare the archive's own checksums too, which reads all of it.
    """
    try:
        if not path.is_file():  # a pipe would never end
            raise _Refused("it is no regular file")
        nbytes = path.stat().st_size
        with path.open("rb") as file:
            _check_ends(file, nbytes)
            with zipfile.ZipFile(file) as archive:
                records = _check_records(archive, nbytes)
            if sums:
                _check_sums(file, records)
            prefix = next(iter(records)).partition("/")[0]
            pickled = records[f"{prefix}/data.pkl"]
            file.seek(_start_of(file, pickled))
            sizes = {name: info.file_size for name, info in records.items()}
            _Walker(file.read(pickled.file_size), f"{prefix}/data/", sizes, nbytes).load()
    except Exception as error:  # damaged pickles and archives make Python raise anything
        raise CheckpointError(f"{path} cannot be read: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    text = str(error)
    if isinstance(error, pickle.UnpicklingError) and "WeightsUnpickler error:" in text:
        # The rest of torch's message advises to switch the protection off.
        text = "it holds what is not loaded from a checkpoint: " + text.rpartition("WeightsUnpickler error:")[2].strip()
    text = text.splitlines()[0] if text else type(error).__name__
    return text if isinstance(error, _Refused | pickle.UnpicklingError) else f"{type(error).__name__}: {text}"[:500]


# -- the archive ----------------------------------------------------------------------------------------------------


def _check_ends(file: Any, nbytes: int) -> None:
    """The archive's directory lies where it must, so that Python and torch see the same one."""
    tail_nbytes = _END.size + _LOCATOR.size + _END64_NBYTES
    file.seek(max(0, nbytes - tail_nbytes))
    tail = file.read(tail_nbytes)
    if len(tail) < _END.size:
        raise _Refused("it is too short for an archive of torch.save")
    signature, _, _, _, _, directory_nbytes, start, comment = _END.unpack(tail[-_END.size :])
    if signature != b"PK\5\6" or comment:
        raise _Refused("it does not end like an archive of torch.save")
    end = nbytes - _END.size
    locator = tail[: -_END.size][-_LOCATOR.size :]
    if locator[:4] == b"PK\6\7":
        end -= _LOCATOR.size + _END64_NBYTES
        if _LOCATOR.unpack(locator)[2] != end:
            raise _Refused("its directory is not where it says")
        directory_nbytes, start = struct.unpack("<QQ", tail[40:_END64_NBYTES])
    if start + directory_nbytes != end:
        raise _Refused("its directory is not where it says")


def _check_records(archive: zipfile.ZipFile, nbytes: int) -> dict[str, zipfile.ZipInfo]:
    """The records, which are stored once each, uncompressed."""
    records: dict[str, zipfile.ZipInfo] = {}
    for info in archive.infolist():
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size or info.flag_bits & 1:
            raise _Refused(f"its record {info.filename!r} is compressed or encrypted")
        if info.filename in records:
            raise _Refused(f"its record {info.filename!r} is there twice")
        records[info.filename] = info
    if not records or sum(info.file_size for info in records.values()) > nbytes:
        raise _Refused("its records are larger than the file")
    if len({name.partition("/")[0] for name in records}) > 1:
        raise _Refused("its records do not lie in one folder")
    return records


def _start_of(file: Any, info: zipfile.ZipInfo) -> int:
    """Where the bytes of a record begin, after its name and padding."""
    file.seek(info.header_offset)
    header = file.read(_LOCAL.size)
    signature, name_nbytes, extra_nbytes = _LOCAL.unpack(header) if len(header) == _LOCAL.size else (b"", 0, 0)
    if signature != b"PK\3\4":
        raise _Refused(f"its record {info.filename!r} is not where its directory says")
    return int(info.header_offset + _LOCAL.size + name_nbytes + extra_nbytes)


def _check_sums(file: Any, records: dict[str, zipfile.ZipInfo]) -> None:
    """No record is damaged; ``torch.serialization.set_crc32_options(False)`` makes files without right sums."""
    damaged = []
    for name, info in records.items():
        file.seek(_start_of(file, info))
        found, left = 0, info.file_size
        while left and (part := file.read(min(left, 2**20))):
            found, left = zlib.crc32(part, found), left - len(part)
        if left or found != info.CRC:
            damaged.append(name)
    if damaged and len(damaged) < len(records):
        raise _Refused(f"its record {damaged[0]!r} is damaged")


# -- the pickle -----------------------------------------------------------------------------------------------------


class _Inert:
    """Stands for whatever a pickle names or makes; takes every operation and does nothing."""

    __slots__ = ("name", "nbytes")

    def __init__(self, name: str, nbytes: int = 0) -> None:
        self.name, self.nbytes = name, nbytes  # of a storage: bytes of its record

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        pass

    extend = add = update = append


class _Call(_Inert):
    """A name in the pickle; calling it checks what the real one would allocate."""

    __slots__ = ("limit",)

    def __init__(self, name: str, limit: int) -> None:
        super().__init__(name)
        self.limit = limit

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        short = self.name.rpartition(".")[2]
        if short == "_rebuild_from_type_v2" and arguments and isinstance(arguments[0], _Call):
            return arguments[0](*arguments[2])
        if short in _REBUILT:
            _check_tensor(arguments, self.limit)
        elif short.endswith(("Storage", "Tensor")) and arguments and self.name.startswith("torch"):
            raise _Refused(f"it calls {self.name} for memory of its own")
        elif short == "bytearray" and arguments and isinstance(arguments[0], int):
            raise _Refused("it asks for memory that it does not fill")
        elif self.name == "_codecs.encode" and arguments[1:] not in ((), ("latin1",), ("utf-8",)):
            raise _Refused("it encodes text in an unusual way")
        return _Inert(self.name)


def _check_tensor(arguments: tuple[Any, ...], limit: int) -> None:
    """A tensor of (storage, offset, shape, strides, ...): a large shape with strides of 0 needs no bytes on disk."""
    storage, _, shape = arguments[:3]
    if not isinstance(storage, _Inert) or not isinstance(shape, tuple):
        raise _Refused("it builds a tensor of something that is no storage")
    if any(type(n) is not int or not 0 <= n < 2**63 for n in shape) or len(shape) > 64:
        raise _Refused("it has a tensor of an impossible shape")
    if math.prod(shape) > limit:
        raise _Refused(f"it has a tensor of shape {list(shape)[:8]}, which is far larger than the file")


class FrugalUnpickler(pickle._Unpickler):
    """Takes no memory for what is not there: the class in C makes its memo as large as a pickle of 20 bytes says."""

    dispatch: ClassVar[dict[int, Any]] = {
        key: value
        for key, value in pickle._Unpickler.dispatch.items()
        if key not in (pickle.BYTEARRAY8[0], pickle.NEXT_BUFFER[0])  # the one makes room before it has read
    }


class _Walker(FrugalUnpickler):
    """Goes through a pickle without making anything."""

    def __init__(self, content: bytes, prefix: str, records: dict[str, int], nbytes: int) -> None:
        super().__init__(io.BytesIO(content))
        self._prefix, self._records, self._limit = prefix, records, nbytes + _EXPANDED

    def find_class(self, module: str, name: str) -> Any:
        return _Call(f"{module}.{name}", self._limit)

    def persistent_load(self, pid: Any) -> Any:
        """A storage: ``("storage", type, key, location, numel)``."""
        if not isinstance(pid, tuple) or len(pid) != 5 or not isinstance(pid[1], _Call):
            raise _Refused("it refers to something that is no storage")
        _, kind, key, _, numel = pid
        short = kind.name.rpartition(".")[2]
        itemsize = _ITEMSIZES.get(short)
        if itemsize is None:
            raise _Refused(f"it has a storage of unknown type {kind.name}")
        record = self._records.get(f"{self._prefix}{key}")
        if type(numel) is not int or record != numel * itemsize:
            raise _Refused(f"its storage {key!r} claims {numel} elements, which its record does not have")
        return _Inert(kind.name, record)

    def _new(self) -> None:
        arguments, kind = self.stack.pop(), self.stack.pop()  # type: ignore[attr-defined]
        self.append(kind(*arguments))  # type: ignore[attr-defined]

    dispatch: ClassVar[dict[int, Any]] = {**FrugalUnpickler.dispatch, pickle.NEWOBJ[0]: _new}
