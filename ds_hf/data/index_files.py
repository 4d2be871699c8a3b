"""Lists of whole numbers in two files, as fairseq and Megatron have them: ``name.bin`` with the numbers of all items,
one after another, ``name.idx`` with their dtype, sizes, offsets and the ends of documents.

Both are read and written byte for byte. Besides, one number for each sample may lie in a NumPy file (``.npy``).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from ds_hf.errors import DsHfError

__all__ = ["MMapIndexedDataset", "MMapIndexedDatasetBuilder", "find_fit_int_dtype", "read_numbers"]

Numbers = NDArray[Any]

_MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<9sQBQQ")  # magic, version, dtype, items, entries of the document index
_CODES: dict[int, Any] = dict(
    enumerate((np.uint8, np.int8, np.int16, np.int32, np.int64, np.uint16, np.uint32, np.uint64), start=1)
)


class MMapIndexedDataset(Dataset[Any]):
    """Items of ``path``.bin, read where they are needed.

    Attributes:
        sizes: int32 ``[items]``: numbers of each item.
        doc_idx: int64: the first item of each document, and their number at the end.
        dtype: of the numbers.
    """

    def __init__(self, path: str | Path, skip_warmup: bool = True) -> None:
        self._path = os.fspath(path)
        raw = _mapped(f"{self._path}.idx")
        magic, version, code, items, documents = _HEAD.unpack(raw[: _HEAD.size].tobytes().ljust(_HEAD.size, b"\0"))
        if magic != _MAGIC or version != 1 or code not in _CODES:
            raise DsHfError(
                f"{self._path}.idx is not an index of this kind: it begins with {magic!r}, version {version}"
            )
        wanted = _HEAD.size + 12 * items + 8 * documents
        if len(raw) < wanted:
            raise DsHfError(f"{self._path}.idx ends after {len(raw)} of {wanted} bytes: write it again")
        self.dtype: Any = _CODES[code]
        self.sizes = np.frombuffer(raw, np.int32, items, _HEAD.size)
        self._offsets = np.frombuffer(raw, np.int64, items, _HEAD.size + 4 * items)
        self.doc_idx = np.frombuffer(raw, np.int64, documents, _HEAD.size + 12 * items)
        if items and int(self.sizes.min()) < 0:
            raise DsHfError(f"{self._path}.idx is damaged: it has an item of {self.sizes.min()} numbers")
        nbytes = int(self.sizes.astype(np.int64).sum()) * np.dtype(self.dtype).itemsize
        self._numbers = _mapped(f"{self._path}.bin")
        if (found := len(self._numbers)) != nbytes:
            what = f"of the {nbytes} bytes" if found < nbytes else f"bytes, and not the {nbytes}"
            raise DsHfError(
                f"{self._path}.bin has {found} {what} that its index names: the two are not of one writing, or "
                "damaged. Write both again"
            )

    def __reduce__(self) -> tuple[type[MMapIndexedDataset], tuple[str]]:
        return type(self), (self._path,)

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int | slice) -> Any:
        """The numbers of an item; of a slice without steps, a list of them."""
        if isinstance(index, slice):
            if index.indices(len(self))[2] != 1:
                raise ValueError("items of a slice lie side by side: leave the step out")
            return [self.get(each) for each in range(*index.indices(len(self)))]
        return self.get(index)

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> Numbers:
        """Numbers of item ``idx``, ``length`` of them from ``offset`` on."""
        size, width = int(self.sizes[idx]), np.dtype(self.dtype).itemsize
        count = size - offset if length is None else length
        return np.frombuffer(self._numbers, self.dtype, count, int(self._offsets[idx]) + offset * width)

    def size(self, index: int) -> int:
        """How many numbers an item has."""
        return int(self.sizes[index])

    def flat(self) -> Numbers:
        """The numbers of all items."""
        return np.frombuffer(self._numbers, self.dtype, int(self.sizes.astype(np.int64).sum()))

    @staticmethod
    def exists(path: str | Path) -> bool:
        """Whether both files are there."""
        return all(os.path.isfile(f"{os.fspath(path)}.{end}") for end in ("bin", "idx"))


class MMapIndexedDatasetBuilder:
    """Writes the two files: items, ends of documents, and ``finalize``.

    Args:
        out_file: ``name.bin``.
        dtype: of NumPy, or a torch dtype of whole numbers.
    """

    def __init__(self, out_file: str | Path, dtype: Any = np.int64) -> None:
        self._file: BinaryIO = open(out_file, "wb")  # noqa: SIM115  # open until ``finalize``
        self._dtype = np.dtype(str(dtype).removeprefix("torch.") if type(dtype).__module__ == "torch" else dtype)
        if self._dtype.type not in _CODES.values():
            raise DsHfError(f"{out_file}: items of {self._dtype} have no code in such files: take whole numbers")
        self._sizes: list[int] = []
        self._documents = [0]

    def add_item(self, tensor: Any) -> None:
        """Add the numbers of a tensor or an array as an item."""
        values = np.asarray(tensor, dtype=self._dtype)
        self._file.write(values.tobytes(order="C"))
        self._sizes.append(values.size)

    add_item_numpy = add_item

    def add_items(self, arr_list: Iterable[Any]) -> None:
        """Add one item after another."""
        for values in arr_list:
            self.add_item(values)

    def end_document(self) -> None:
        """A document ends with the last item."""
        self._documents.append(len(self._sizes))

    def merge_file_(self, another_file: str | Path) -> None:
        """Add all items and documents of ``another_file``, whose dtype is the same."""
        other = MMapIndexedDataset(another_file)
        if other.dtype != self._dtype.type:
            raise DsHfError(f"{another_file} has items of {np.dtype(other.dtype)}, and this file of {self._dtype}")
        before = len(self._sizes)
        self._sizes += other.sizes.tolist()
        self._documents += (before + other.doc_idx[1:]).tolist()
        self._file.write(other.flat().tobytes())

    def finalize(self, index_file: str | Path) -> None:
        """Close the numbers and write ``name.idx``."""
        self._file.close()
        sizes = np.array(self._sizes, dtype=np.int64)
        offsets = (np.cumsum(sizes) - sizes) * self._dtype.itemsize
        code = next(code for code, dtype in _CODES.items() if dtype is self._dtype.type)
        with open(index_file, "wb") as file:
            file.write(_HEAD.pack(_MAGIC, 1, code, len(sizes), len(self._documents)))
            file.write(sizes.astype(np.int32).tobytes())
            file.write(offsets.tobytes())
            file.write(np.array(self._documents, dtype=np.int64).tobytes())


def find_fit_int_dtype(min_value: float, max_value: float) -> Any:
    """The smallest dtype of whole numbers that has both: without a sign, where there are none below 0."""
    kinds = (np.uint8, np.uint16, np.uint32, np.uint64) if min_value >= 0 else (np.int8, np.int16, np.int32, np.int64)
    return next(
        (kind for kind in kinds[:-1] if np.iinfo(kind).min <= min_value and max_value <= np.iinfo(kind).max), kinds[-1]
    )


def read_numbers(path: str | Path) -> Numbers:
    """One number for each sample: of a ``.npy`` file, or of an indexed file with items of one number.

    Raises:
        DsHfError: it has another shape, or cannot be read.
    """
    name = os.fspath(path)
    if name.endswith(".npy"):
        try:
            found = cast(Numbers, np.load(name, mmap_mode="r", allow_pickle=False))
        except (OSError, ValueError, EOFError) as error:
            raise DsHfError(f"{name} cannot be read: {error}") from error
        if not isinstance(found, np.ndarray):
            raise DsHfError(f"{name} has several arrays, as numpy.savez writes them: write one, with numpy.save")
        if found.ndim != 1 or found.dtype.kind not in "iuf":
            raise DsHfError(
                f"{name} has shape {found.shape} and dtype {found.dtype}: one number for each sample is needed"
            )
        return found
    stored = MMapIndexedDataset(name)
    if len(stored) and not (stored.sizes == 1).all():
        raise DsHfError(f"{name} has items of {int(stored.sizes.max())} numbers: one number for each sample is needed")
    return stored.flat()


def _mapped(name: str) -> Any:
    try:
        if not os.path.getsize(name):
            return np.empty(0, np.uint8)
        return np.memmap(name, np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise DsHfError(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}") from error
