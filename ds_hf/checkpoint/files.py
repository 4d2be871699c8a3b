"""Files of a checkpoint: their names, and writing each so that it is whole on disk or not there.

``write_tensor_file`` streams: only one tensor is in host memory at a time, and the checksum of the file and the digests
of what the tensors hold are summed on the way. What is pickled is checked to load under ``weights_only=True`` before a
byte is written.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ds_hf.checkpoint.checksum import Checksum, add, sum_of_slice
from ds_hf.checkpoint.format import SavedCut
from ds_hf.checkpoint.holds import sync
from ds_hf.dtypes import name_of
from ds_hf.errors import CheckpointError

__all__ = [
    "StateStretch",
    "TensorEntry",
    "Values",
    "WrittenFile",
    "check_loadable",
    "drop_unloadable",
    "get_checkpoint_files",
    "get_model_state_file",
    "get_model_state_files",
    "get_optim_files",
    "in_file_order",
    "model_states_name",
    "naming_the_file",
    "optimizer_states_name",
    "pickled",
    "replace_text",
    "safetensors_header",
    "tensors_name",
    "write_bytes",
    "write_pickled",
    "write_tensor_file",
    "write_tensors",
    "write_text",
]

_CHUNK = 2**23  # bytes written at a time

_DTYPE_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def tensors_name(rank: int) -> str:
    """The rank's tensors."""
    return f"rank_{rank:05d}.safetensors"


def model_states_name(rank: int, *, sharded: bool) -> str:
    """DeepSpeed's name of the file that rank 0 writes, or every rank when parameters are sharded."""
    return f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if sharded else "mp_rank_00_model_states.pt"


def get_checkpoint_files(checkpoint_dir: str | Path, glob_pattern: str) -> list[str]:
    """The files of a checkpoint's own folder that fit the pattern, numbers in their names in order.

    Raises:
        FileNotFoundError: there is none.
    """
    found = [os.fspath(path) for path in Path(checkpoint_dir).glob(glob_pattern)]
    if not found:
        raise FileNotFoundError(f"{checkpoint_dir} has no file {glob_pattern}: name the folder of one tag")
    parts = re.compile(r"([0-9]+)").split
    return sorted(found, key=lambda name: [(len(part), part) if part.isdigit() else (0, part) for part in parts(name)])


def get_optim_files(checkpoint_dir: str | Path) -> list[str]:
    """The ranks' optimizer files."""
    return get_checkpoint_files(checkpoint_dir, "*_optim_states.pt")


def get_model_state_files(checkpoint_dir: str | Path) -> list[str]:
    """The ranks' model files."""
    return get_checkpoint_files(checkpoint_dir, "*_model_states.pt")


def get_model_state_file(checkpoint_dir: str | Path, zero_stage: int) -> str:
    """Rank 0's model file, whose name depends on whether parameters are sharded.

    Raises:
        FileNotFoundError: there is no such folder or file.
    """
    path = Path(checkpoint_dir) / model_states_name(0, sharded=zero_stage > 2)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    return os.fspath(path)


def optimizer_states_name(rank: int, *, bf16: bool) -> str:
    """DeepSpeed's name of the file that every rank writes."""
    return f"{'bf16_' if bf16 else ''}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


@dataclass(frozen=True)
class StateStretch:
    """Elements of a stored tensor that are elements ``start`` to ``start + numel`` of a state of a parameter.

    Attributes:
        offset: of the first of them in the stored tensor.
        shape: of the whole parameter.
        cut: the slice whose elements ``start`` counts, ``None`` for the whole.
    """

    name: str
    state: str
    start: int
    offset: int
    numel: int
    shape: tuple[int, ...]
    cut: SavedCut | None = None

    @classmethod
    def whole(cls, name: str, state: str, tensor: Tensor) -> tuple[StateStretch, ...]:
        """All of a tensor, in one piece."""
        return (cls(name, state, 0, 0, tensor.numel(), tuple(tensor.shape)),) if tensor.numel() else ()

    def sum_of(self, elements: Tensor) -> tuple[int, int] | None:
        """The part that ``elements``, which are the stretch, have in the sum of the state, see ``checksum``."""
        return sum_of_slice(elements, self.shape, self.cut, self.start)


class Values(Protocol):
    """Where the elements of a stored tensor come from."""

    def value(self) -> Tensor:
        """All of them."""

    def fill(self, target: Tensor) -> None:
        """The same written into a flat tensor, without making it first."""

    def part(self, offset: int, numel: int) -> Tensor:
        """Some of them, flat, where they lie."""


@dataclass(frozen=True)
class _Given:
    """Elements of a tensor that is there."""

    tensor: Tensor

    def value(self) -> Tensor:
        return self.tensor

    def fill(self, target: Tensor) -> None:
        target.copy_(self.tensor.reshape(-1), non_blocking=True)

    def part(self, offset: int, numel: int) -> Tensor:
        return self.tensor.reshape(-1)[offset : offset + numel]


@dataclass(frozen=True)
class TensorEntry:
    """A tensor to write, made only when its turn comes; ``stretches`` say what its elements are, for the digests."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    source: Values
    stretches: tuple[StateStretch, ...] = ()

    @classmethod
    def of(cls, tensor: Tensor, stretches: Sequence[StateStretch] = ()) -> TensorEntry:
        return cls(tuple(tensor.shape), tensor.dtype, _Given(tensor.detach()), tuple(stretches))

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def state_key(self, stretch: StateStretch) -> str:
        """What the sum of a stretch is called: sums of other dtypes cannot be compared."""
        return f"{stretch.state}:{name_of(self.dtype)}"


@dataclass
class WrittenFile:
    """A file on disk.

    Attributes:
        sums: of each state ("exp_avg:float32") of each parameter, the sum of the part that lies in this file;
            ``None`` for a slice that has none, see ``checksum.sum_of_slice``.
    """

    nbytes: int
    checksum: str
    sums: dict[str, dict[str, tuple[int, int] | None]] = field(default_factory=dict)


def in_file_order(entries: Mapping[str, TensorEntry]) -> list[tuple[str, TensorEntry]]:
    """Wide dtypes first: every tensor then starts at a multiple of its element size, which readers want."""
    return sorted(entries.items(), key=lambda item: -item[1].dtype.itemsize)


def safetensors_header(
    tensors: Iterable[tuple[str, tuple[int, ...], torch.dtype]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, int]]:
    """What a safetensors file of these tensors begins with, and where the bytes of each begin after it.

    Raises:
        CheckpointError: a dtype that such files cannot have.
    """
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    places: dict[str, int] = {}
    end = 0
    for name, shape, dtype in tensors:
        if dtype not in _DTYPE_CODES:
            raise CheckpointError(f"{name}: tensors of dtype {dtype} cannot be stored in safetensors")
        start, end = end, end + math.prod(shape) * dtype.itemsize
        places[name] = start
        header[name] = {"dtype": _DTYPE_CODES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, places


def write_tensor_file(path: Path, entries: Mapping[str, TensorEntry]) -> WrittenFile:
    """Write a safetensors file."""
    ordered = in_file_order(entries)
    written = WrittenFile(0, "")
    with naming_the_file(path), path.open("xb", buffering=0) as file:
        out = _SummingWriter(file)
        out.write(safetensors_header((key, entry.shape, entry.dtype) for key, entry in ordered)[0])
        for key, entry in ordered:
            value = entry.source.value().detach()
            assert (value.dtype, tuple(value.shape)) == (entry.dtype, entry.shape), key
            flat = value.cpu().contiguous().reshape(-1)
            for stretch in entry.stretches:
                found = stretch.sum_of(flat[stretch.offset : stretch.offset + stretch.numel])
                states, state = written.sums.setdefault(stretch.name, {}), entry.state_key(stretch)
                known = states.get(state, (0, 0))
                states[state] = None if found is None or known is None else add(known, found)
            out.write(flat.view(torch.uint8).numpy())
        os.fsync(file.fileno())
    written.nbytes, written.checksum = out.nbytes, out.checksum.text()
    return written


@contextmanager
def naming_the_file(path: Path) -> Iterator[None]:
    """A write that fails, on a full disk, does not tell of which file."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


class _SummingWriter:
    """Writes to an unbuffered file and sums what it writes, while it is in the cache."""

    def __init__(self, file: Any) -> None:
        self.file = file
        self.nbytes = 0
        self.checksum = Checksum()

    def write(self, data: Any) -> None:
        view = memoryview(data)  # of bytes: an empty one cannot be cast
        for low in range(0, len(view), _CHUNK):
            chunk = view[low : low + _CHUNK]
            self.checksum.update(chunk)
            while chunk:  # an unbuffered file may take less than it is given
                chunk = chunk[self.file.write(chunk) :]
        self.nbytes += len(view)


def write_tensors(path: Path, entries: Mapping[str, TensorEntry]) -> int:
    """Write a safetensors file and return its size in bytes."""
    return write_tensor_file(path, entries).nbytes


def write_bytes(path: Path, content: bytes) -> WrittenFile:
    """Write a new file."""
    with naming_the_file(path), path.open("xb", buffering=0) as file:
        out = _SummingWriter(file)
        out.write(content)
        os.fsync(file.fileno())
    return WrittenFile(out.nbytes, out.checksum.text())


def pickled(content: dict[str, Any]) -> bytes:
    """A file for ``torch.load(weights_only=True)``."""
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


def write_pickled(path: Path, content: dict[str, Any]) -> int:
    """Write a file for ``torch.load(weights_only=True)`` and return its size in bytes."""
    return write_bytes(path, pickled(content)).nbytes


def write_text(path: Path, text: str, mode: int = 0o644) -> int:
    """Write a new text file and return its size in bytes."""
    with naming_the_file(path), path.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    path.chmod(mode)
    return path.stat().st_size


def replace_text(path: Path, text: str, mode: int = 0o644) -> None:
    """Replace a text file; readers see the old content or the new, never less."""
    staged = path.with_name(f".{path.name}.{os.getpid()}.new")
    staged.unlink(missing_ok=True)
    try:
        write_text(staged, text, mode)
        os.replace(staged, path)
    finally:
        staged.unlink(missing_ok=True)
    sync(path.parent)


def _loads(value: Any) -> str | None:
    """Why ``value`` would not come back, ``None`` when it does."""
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        stream.seek(0)
        torch.load(stream, weights_only=True, map_location="cpu")
    except Exception as error:  # pickling runs code of the objects: anything may be raised
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def check_loadable(value: Any, where: str) -> None:
    """Refuse what ``torch.load(weights_only=True)`` would refuse, naming the key.

    Raises:
        CheckpointError: with the path of the first offending value.
    """
    if _loads(value) is None:
        return
    if isinstance(value, Mapping):
        for key, item in value.items():
            if type(key) not in (str, int, float, bool, tuple):
                raise CheckpointError(f"{where} has a key of type {type(key).__name__}; use text or numbers")
            check_loadable(item, f"{where}[{key!r}]")
    elif type(value) in (list, tuple, set):
        for index, item in enumerate(value):
            check_loadable(item, f"{where}[{index}]")
    raise CheckpointError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold: it is read "
        "without running code (torch.load(weights_only=True)). Store numbers, text, tensors, lists and dicts instead, "
        "for example the object's state_dict(), or .tolist() of an array"
    )


def drop_unloadable(options: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """``options`` without what a checkpoint cannot hold, and the names left out."""
    if _loads(dict(options)) is None:
        return dict(options), []
    left_out = [key for key, value in options.items() if _loads(value) is not None]
    return {key: value for key, value in options.items() if key not in left_out}, left_out
