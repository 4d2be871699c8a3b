#!/usr/bin/env python
"""Reads ds_hf checkpoints and turns one into whole fp32 weights:  zero_to_fp32.py CHECKPOINT OUT

This file is also copied into every checkpoint, so it needs nothing but torch and safetensors; run your own copy on a
stranger's checkpoint, not his. It owns the reading of the format; nothing that a manifest says is believed before it is
checked: names of files stay inside the folder, the fragments of a parameter cover it exactly once, no element is used
twice, and no tensor is larger than the files that hold it.

manifest.json: for each parameter its shape, the tensor key of each state ("master" or "weight", moments), and
``fragments`` [file, start in the parameter, start in the tensor, numel]; all figures are elements, tensors are flat.
In version 2 a model-parallel run may have saved slices: ``cuts`` lists [dim, [[first index, indices], ...]], a fragment
of a slice has the number of its cut as a fifth figure, and its start counts in the flattened slice.
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import fcntl
import glob
import hashlib
import itertools
import json
import math
import os
import re
import shutil
import socket
import stat
import sys
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

try:
    from ds_hf.errors import CheckpointError, CheckpointPlaceError
    from ds_hf.printable import printable
except ImportError:  # alone in a checkpoint, on a machine without ds_hf

    class CheckpointError(RuntimeError):  # type: ignore[no-redef]
        """A checkpoint is missing, incomplete, damaged or does not fit the model."""

    class CheckpointPlaceError(CheckpointError, ValueError):  # type: ignore[no-redef]
        """What was given as the folder or the tag of a checkpoint cannot be one."""

    def printable(text: object) -> str:
        """``str(text)`` without what steers a terminal."""
        return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in str(text))


__all__ = [
    "FORMAT",
    "LATEST",
    "MANIFEST",
    "SLICED_VERSION",
    "VERSION",
    "Beside",
    "Box",
    "Hold",
    "Manifest",
    "SavedCut",
    "SavedFragment",
    "SavedParameter",
    "TensorFiles",
    "boot_of",
    "boxes",
    "convert_zero_checkpoint_to_fp32_state_dict",
    "convert_zero_checkpoint_to_state_dict",
    "cover_fault",
    "find_folder",
    "folder_of",
    "get_fp32_state_dict_from_zero_checkpoint",
    "is_folder",
    "load_state_dict_from_zero_checkpoint",
    "pointed_at",
    "publish_weights",
    "read_manifest",
    "recover",
    "sealed",
    "sync",
    "tag_fault",
    "this_writer",
    "to_torch_tensor",
    "untouched",
    "weights_aside",
]

FORMAT = "ds_hf checkpoint"
VERSION = 1  # of a checkpoint without slices, which the first version of ds_hf reads as well
SLICED_VERSION = 2
MANIFEST = "manifest.json"
LATEST = "latest"
_READ_AT_ONCE = 2**24  # elements of a fragment that is cut otherwise than what is wanted
_LATEST_NBYTES = 4096  # a file 'latest' may have
_MANIFEST_NBYTES = 2**22  # that a manifest may always have; more in proportion to the tensors
_DTYPES = {
    "fp32": torch.float32, "float32": torch.float32, "fp16": torch.float16, "float16": torch.float16,
    "bf16": torch.bfloat16, "bfloat16": torch.bfloat16,
}  # fmt: skip
LEFT_ALONE_S = 600.0  # what another machine's process staged is abandoned if it was not written to for so long
_ENTRIES = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
)  # of whole weights, in the order in which transformers looks for them: it reads the first that is there  # fmt: skip
_WEIGHTS = re.compile(r"(pytorch_)?model(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?")
_ASIDE = ".weights.saving-"
_UNNAMED = ".held"
CONFIG, POINTER = "config.json", "transformers_weights"  # the key that names a file of weights for transformers
_CONFIG_NBYTES = 2**24
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


# -- the manifest ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SavedCut:
    """A slice of a parameter: ``(first index, number of indices)`` of one dim, in the order in which they lie there."""

    dim: int
    ranges: tuple[tuple[int, int], ...]

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each range begins in the slice, and last where the slice ends."""
        return (0, *itertools.accumulate(count for _, count in self.ranges))

    @property
    def length(self) -> int:
        """Indices of ``dim`` in the slice."""
        return self.starts[-1]

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Of the slice of a parameter whose shape is ``whole``."""
        return (*whole[: self.dim], self.length, *whole[self.dim + 1 :])

    def numel(self, whole: Sequence[int]) -> int:
        """Elements of the slice."""
        return math.prod(self.shape(whole))


@dataclass(frozen=True)
class SavedFragment:
    """Elements ``start`` to ``start + numel`` of a parameter: ``offset`` elements into a flat tensor of ``file``.

    With a ``cut`` they are elements of that slice, flattened.
    """

    file: str
    start: int
    offset: int
    numel: int
    cut: SavedCut | None = None


@dataclass(frozen=True)
class SavedParameter:
    """One parameter; ``states`` maps "master", "weight", "exp_avg", ... to tensor keys."""

    name: str
    shape: tuple[int, ...]
    trainable: bool
    states: dict[str, str]
    fragments: tuple[SavedFragment, ...]
    scalars: dict[str, Any]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def value_state(self) -> str:
        """The state that holds the value most exactly."""
        return "master" if "master" in self.states else "weight"

    @property
    def moments(self) -> list[str]:
        """Optimizer states with one value for each element."""
        return [state for state in self.states if state not in ("master", "weight")]


@dataclass(frozen=True)
class SavedBuffer:
    """A buffer of the module, whole."""

    name: str
    shape: tuple[int, ...]
    file: str
    key: str


@dataclass(frozen=True)
class Manifest:
    """A checked manifest; ``extra`` is the JSON itself, for what is not about tensors."""

    folder: Path
    world_size: int
    parameters: dict[str, SavedParameter]
    buffers: dict[str, SavedBuffer]
    tied: dict[str, str]
    excluded: frozenset[str]
    files: dict[str, int]
    extra: dict[str, Any]

    def check_files(self) -> None:
        """Raise ``CheckpointError`` for the first file that is missing or has another size than when it was written."""
        for name, nbytes in self.files.items():
            path = self.folder / name
            try:
                found = _regular_nbytes(path)
            except FileNotFoundError:
                raise CheckpointError(f"{path} is missing: the checkpoint is incomplete") from None
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error}") from error
            if found != nbytes:
                raise CheckpointError(
                    f"{path} has {found} bytes where {nbytes} were written: the checkpoint is damaged"
                )

    def check_sums(self) -> None:
        """Raise ``CheckpointError`` for the first file that has not the checksum it was written with. Reads all."""
        known = self.extra.get("checksums")
        if not isinstance(known, dict):  # written before there were any
            return
        for name in self.files:
            try:
                if known.get(name) not in (None, _checksum(self.folder / name)):
                    raise CheckpointError(
                        f"{self.folder / name} does not have the checksum that was written: the checkpoint is damaged"
                    )
            except OSError as error:
                raise CheckpointError(f"{self.folder / name} cannot be read: {error}") from error

    def check_tensors(self, files: TensorFiles) -> None:
        """Raise ``CheckpointError`` if a tensor that the manifest speaks of is not there or too short."""
        for parameter in self.parameters.values():
            for fragment in parameter.fragments:
                for key in parameter.states.values():
                    files.piece(fragment.file, key)._check(fragment.offset + fragment.numel)
        for buffer in self.buffers.values():
            shape = files.piece(buffer.file, buffer.key).shape
            if shape != buffer.shape:
                raise CheckpointError(
                    f"{self.folder / buffer.file}: buffer {buffer.name} has shape {shape}, the manifest says "
                    f"{buffer.shape}"
                )


def read_manifest(folder: str | Path) -> Manifest:
    """Read and check the manifest of one checkpoint folder.

    Raises:
        CheckpointError: there is none, or it contradicts itself.
    """
    path = Path(folder) / MANIFEST
    try:
        text = _read_text(path, _MANIFEST_NBYTES + _nbytes_in(path.parent))
        content = json.loads(text, object_pairs_hook=_without_doubles)
        _check_seal(text, content)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing: the folder is not a complete ds_hf checkpoint (its saving was interrupted, or "
            "another library wrote it)"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return _ManifestParser(path).parse(content)


def sealed(content: dict[str, Any]) -> str:
    """The text of a manifest, which begins with the checksum of what follows."""
    text = json.dumps(content)[1:]
    return f'{{"checksum": "{_seal(text)}", {text}'


def _seal(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _check_seal(text: str, content: Any) -> None:
    """Damage to numbers would go unnoticed; an edited manifest may leave the entry out."""
    if not isinstance(content, dict) or "checksum" not in content:
        return
    first = re.match(r'\{"checksum": "[0-9a-f]{32}", ', text)
    if first is not None:
        rest = text[first.end() :]
    else:  # the entry was moved, or its value is none: what is there besides is written as ``sealed`` does
        rest = json.dumps({key: value for key, value in content.items() if key != "checksum"})[1:]
    if content["checksum"] != _seal(rest):
        raise ValueError("it is not what was written, but damaged or edited; without the entry 'checksum' it is read")


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Readers differ in which of two equal keys they take."""
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("a key appears twice")
    return content


def _regular_nbytes(path: Path) -> int:
    """Size of a file; whatever is none (a pipe would never end) is an ``OSError``."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError("it is not a regular file")
    return status.st_size


def _read_text(path: Path, most: int) -> str:
    """A small text file, not more of it than it should have."""
    nbytes = _regular_nbytes(path)
    if nbytes > most:
        raise OSError(f"it has {nbytes} bytes, too many for what it describes")
    with path.open("rb") as file:
        return file.read(nbytes).decode("utf-8")


def _nbytes_in(folder: Path) -> int:
    """Bytes of tensors in a folder."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors") if path.is_file())


def _checksum(path: Path) -> str:
    """As ``ds_hf.checkpoint.checksum``: words of 64 bits, their sum and the sum of word times place."""
    buffer = bytearray(2**18)
    words = torch.frombuffer(buffer, dtype=torch.int64)
    places = torch.arange(1, words.numel() + 1)
    first = second = start = 0
    with path.open("rb", buffering=0) as file:
        while count := _fill(file, buffer):
            numel = -(-count // 8)
            buffer[count : 8 * numel] = bytes(8 * numel - count)
            mixed = words[:numel] ^ ((words[:numel] >> 32) & 0xFFFFFFFF)
            total = int(mixed.sum())
            first += total
            second += int((mixed * places[:numel]).sum()) + start * total
            start += numel
    return f"{first % 2**64:016x}{second % 2**64:016x}"


def _fill(file: Any, buffer: bytearray) -> int:
    """Read until the buffer is full or the file ends."""
    view, count = memoryview(buffer), 0
    while count < len(buffer) and (more := file.readinto(view[count:])):
        count += more
    return count


class _ManifestParser:
    """Turns JSON into a ``Manifest`` and refuses whatever is not as it was written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: dict[str, int] = {}
        self.cuts: list[SavedCut] = []
        self.used: dict[tuple[str, str], list[tuple[int, int, str]]] = {}  # stretches of tensors, by file and key

    def parse(self, content: Any) -> Manifest:
        content = self._of(dict, content, "the manifest")
        if content.get("format") != FORMAT:
            self._fail(f"it does not say format {FORMAT!r}")
        version = content.get("version")
        if type(version) is not int or version not in (VERSION, SLICED_VERSION):
            self._fail(f"it has version {version!r}; this ds_hf reads {VERSION} and {SLICED_VERSION}: update ds_hf")
        if version == SLICED_VERSION:
            self.cuts = [self._cut(entry) for entry in self._of(list, content.get("cuts"), "cuts")]
        for name, nbytes in self._of(dict, content.get("files"), "files").items():
            self._plain_file(name)
            self.files[name] = self._count(nbytes, f"size of {name}")
        parameters = {
            name: self._parameter(name, entry)
            for name, entry in self._of(dict, content.get("parameters"), "parameters").items()
        }
        if sum(p.numel for p in parameters.values()) > sum(self.files.values()):
            self._fail("its parameters are larger than all files together")
        buffers = {
            name: self._buffer(name, entry) for name, entry in self._of(dict, content.get("buffers"), "buffers").items()
        }
        self._check_use()
        if parameters.keys() & buffers.keys():
            self._fail(f"{min(parameters.keys() & buffers.keys())} is a parameter and a buffer")
        excluded = [self._of(str, name, "excluded") for name in self._of(list, content.get("excluded"), "excluded")]
        tied = self._of(dict, content.get("tied"), "tied")
        for alias, name in tied.items():
            self._name(alias)
            if alias in parameters or alias in buffers:
                self._fail(f"{alias} is tied to another name and has values of its own")
            if self._of(str, name, "tied") not in parameters and name not in buffers and name not in excluded:
                self._fail(f"{alias} is tied to {name!r}, which it does not have")
        world_size = self._count(content.get("world_size"), "world_size")
        return Manifest(
            self.path.parent, world_size, parameters, buffers, tied, frozenset(excluded), self.files, content
        )

    def _fail(self, reason: str) -> None:
        raise CheckpointError(f"{self.path}: {reason}")

    def _of(self, kind: type[Any], value: Any, what: str) -> Any:
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            self._fail(f"{what} should be of type {kind.__name__}, not {type(value).__name__}")
        return value

    def _count(self, value: Any, what: str) -> int:
        if self._of(int, value, what) < 0:
            self._fail(f"{what} is negative")
        if value >= 2**63:
            self._fail(f"{what} is larger than any file")
        return int(value)

    def _name(self, name: str) -> None:
        if not name.isprintable():  # it would come out in messages and do things to the terminal
            self._fail(f"{name!r} cannot be a name")

    def _check_use(self) -> None:
        """No element belongs to two parameters: many could claim the same bytes, more than memory has."""
        for (file, key), stretches in self.used.items():
            stretches.sort()
            for (_, end, name), (start, _, other) in itertools.pairwise(stretches):
                if start < end:
                    self._fail(f"{name} and {other} overlap in tensor {key!r} of {file}")

    def _plain_file(self, name: Any) -> None:
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*", name):
            self._fail(f"{name!r} is not a plain file name")

    def _known_file(self, name: Any) -> str:
        if not isinstance(name, str) or name not in self.files:
            self._fail(f"{name!r} is not one of its files")
        return str(name)

    def _shape(self, value: Any, what: str) -> tuple[int, ...]:
        shape = tuple(self._count(n, f"shape of {what}") for n in self._of(list, value, f"shape of {what}"))
        if len(shape) > 64 or math.prod(shape) >= 2**63:
            self._fail(f"shape of {what} is impossible")
        return shape

    def _parameter(self, name: str, entry: Any) -> SavedParameter:
        self._name(name)
        entry = self._of(dict, entry, name)
        shape = self._shape(entry.get("shape"), name)
        states = self._of(dict, entry.get("states"), f"states of {name}")
        for state, key in states.items():
            self._name(state)
            self._of(str, key, f"states of {name}")
        if not states.keys() & {"master", "weight"}:
            self._fail(f"{name} has neither master nor weight")
        rows = self._of(list, entry.get("fragments"), f"fragments of {name}")
        fragments = [self._fragment(name, row) for row in rows]
        for fragment in fragments:
            for key in states.values():
                place = (fragment.offset, fragment.offset + fragment.numel, name)
                self.used.setdefault((fragment.file, key), []).append(place)
        fault = cover_fault(shape, fragments)
        if fault:
            self._fail(f"the fragments of {name} {fault}")
        scalars = self._of(dict, entry.get("scalars", {}), f"scalars of {name}")
        trainable = self._of(bool, entry.get("trainable"), f"trainable of {name}")
        return SavedParameter(name, shape, trainable, states, tuple(fragments), scalars)

    def _fragment(self, name: str, row: Any) -> SavedFragment:
        if not isinstance(row, list) or len(row) not in (4, 5):
            self._fail(f"a fragment of {name} is not [file, start, offset, numel]")
        start, offset, numel, *further = (self._count(n, f"fragment of {name}") for n in row[1:])
        if further and further[0] >= len(self.cuts):
            self._fail(f"a fragment of {name} has cut {further[0]}, which is not among its cuts")
        return SavedFragment(self._known_file(row[0]), start, offset, numel, self.cuts[further[0]] if further else None)

    def _cut(self, entry: Any) -> SavedCut:
        if not isinstance(entry, list) or len(entry) != 2:
            self._fail("a cut is not [dim, ranges]")
        ranges = []
        for pair in self._of(list, entry[1], "the ranges of a cut"):
            if not isinstance(pair, list) or len(pair) != 2:
                self._fail("a range of a cut is not [first index, indices]")
            first, count = (self._count(n, "range of a cut") for n in pair)
            ranges.append((first, count))
        return SavedCut(self._count(entry[0], "dim of a cut"), tuple(ranges))

    def _buffer(self, name: str, entry: Any) -> SavedBuffer:
        self._name(name)
        entry = self._of(dict, entry, name)
        file, shape = self._known_file(entry.get("file")), self._shape(entry.get("shape"), name)
        key = self._of(str, entry.get("key"), name)
        self.used.setdefault((file, key), []).append((0, max(1, math.prod(shape)), name))
        return SavedBuffer(name, shape, file, key)


# -- slices ---------------------------------------------------------------------------------------------------------


def cover_fault(shape: Sequence[int], fragments: Sequence[SavedFragment]) -> str:
    """What keeps fragments from being each element of a parameter once, as the end of a sentence; empty when they are.

    Those of a slice have to follow one another, and the slices of a parameter are cut along the same dim.
    """
    ends: dict[int, int] = {}  # by identity: a cut may have many ranges
    cuts: dict[int, SavedCut | None] = {}
    for fragment in fragments:
        key = id(fragment.cut)
        cuts[key], end = fragment.cut, ends.get(key, 0)
        if fragment.start != end or fragment.numel == 0:
            return f"do not follow one another at element {end}"
        ends[key] = end + fragment.numel
    slices = [cut for cut in cuts.values() if cut is not None]
    if not slices:
        end, numel = sum(ends.values()), math.prod(shape)
        return "" if end == numel else f"have {end} elements, its shape {list(shape)} has {numel}"
    dim = slices[0].dim
    if len(slices) < len(cuts) or any(cut.dim != dim for cut in slices) or dim >= len(shape):
        return f"are of slices that are not parts of one dimension of its shape {list(shape)}"
    end = 0
    for first, count in sorted(pair for cut in slices for pair in cut.ranges):
        if first != end or count == 0:
            times = "not at all" if first > end else "more than once"
            return f"hold index {min(first, end)} of dimension {dim} of its shape {list(shape)} {times}"
        end += count
    if end != shape[dim]:
        return f"hold {end} indices of dimension {dim} of its shape {list(shape)}"
    for cut in slices:
        if ends[id(cut)] != cut.numel(shape):
            return f"have {ends[id(cut)]} of the {cut.numel(shape)} elements of a slice of its shape {list(shape)}"
    return ""


@dataclass(frozen=True)
class Box:
    """Elements of a whole parameter, and where they lie in a flattened slice of it.

    Attributes:
        ranges: from where to where in each dim of the whole, as ``_joined`` gives them.
        strides: of the slice in these dims.
        offset: of the first element, in the slice.
    """

    ranges: tuple[tuple[int, int], ...]
    strides: tuple[int, ...]
    offset: int

    def part(self, other: Box) -> tuple[tuple[int, int], ...] | None:
        """What both have, ``None`` for nothing."""
        both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(self.ranges, other.ranges, strict=True))
        return both if all(low < high for low, high in both) else None

    def place(self, ranges: Sequence[tuple[int, int]]) -> int:
        """Where in the slice a part of the box begins."""
        corners = zip(ranges, self.ranges, self.strides, strict=True)
        return self.offset + sum((low - start) * stride for (low, _), (start, _), stride in corners)

    def view(self, flat: Tensor, start: int, ranges: Sequence[tuple[int, int]]) -> Tensor:
        """A part of the box in ``flat``, which has the slice from element ``start`` on."""
        size = tuple(high - low for low, high in ranges)
        return flat.as_strided(size, self.strides, flat.storage_offset() + self.place(ranges) - start)


def boxes(shape: Sequence[int], cut: SavedCut | None, start: int, stop: int, *dims: int) -> Iterator[Box]:
    """Elements ``start`` to ``stop`` of a flattened slice of a parameter of ``shape``, as few boxes of the whole.

    Args:
        cut: ``None`` if the slice is the whole.
        dims: those that stay by themselves besides the one that is cut; other dims are joined to their neighbours.
    """
    sizes, place = _joined(shape, {*dims, *(() if cut is None else (cut.dim,))})
    at = len(sizes)
    if cut is not None:
        at = place[cut.dim]
        sizes[at] = cut.length
    strides = tuple(math.prod(sizes[index + 1 :]) for index in range(len(sizes)))
    for ranges in _stretch(sizes, start, stop):
        box = Box(ranges, strides, sum(low * stride for (low, _), stride in zip(ranges, strides, strict=True)))
        if cut is None:
            yield box
            continue
        bottom, top = ranges[at]
        for index in range(bisect.bisect_right(cut.starts, bottom) - 1, len(cut.ranges)):
            low, high = max(bottom, cut.starts[index]), min(top, cut.starts[index + 1])
            if low >= top:
                break
            shift = cut.ranges[index][0] - cut.starts[index]
            moved = (*ranges[:at], (low + shift, high + shift), *ranges[at + 1 :])
            yield Box(moved, strides, box.offset + (low - bottom) * strides[at])


def _joined(shape: Sequence[int], dims: set[int]) -> tuple[list[int], dict[int, int]]:
    """``shape`` with neighbouring dims joined but for ``dims``, and where these are in it."""
    sizes: list[int] = []
    places: dict[int, int] = {}
    end = 0
    for dim in sorted(dims):
        sizes += [math.prod(shape[end:dim]), shape[dim]]
        places[dim] = len(sizes) - 1
        end = dim + 1
    return [*sizes, math.prod(shape[end:])], places


def _stretch(sizes: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """The boxes that elements ``start`` to ``stop`` of a tensor of ``sizes`` are, at most two for each further dim."""
    if start >= stop:
        return
    if len(sizes) == 1:
        yield ((start, stop),)
        return
    row = math.prod(sizes[1:])
    (first, low), (last, high) = divmod(start, row), divmod(stop, row)
    if first == last:
        yield from (((first, first + 1), *rest) for rest in _stretch(sizes[1:], low, high))
        return
    if low:
        yield from (((first, first + 1), *rest) for rest in _stretch(sizes[1:], low, row))
        first += 1
    if first < last:
        yield ((first, last), *((0, size) for size in sizes[1:]))
    yield from (((last, last + 1), *rest) for rest in _stretch(sizes[1:], 0, high))


# -- the tensors ----------------------------------------------------------------------------------------------------


class TensorFiles:
    """The safetensors files of one folder, opened as they are needed; only what is asked for is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._handles: dict[str, Any] = {}
        self._pieces: dict[tuple[str, str], _Piece] = {}

    def piece(self, file: str, key: str) -> _Piece:
        """One tensor of one file, not read yet."""
        found = self._pieces.get((file, key))
        if found is None:
            path = self.folder / file
            try:
                if file not in self._handles:
                    _regular_nbytes(path)
                    path.open("rb").close()  # says what is wrong; safetensors says that there is no such file
                    self._handles[file] = safe_open(path, framework="pt")
                found = self._pieces[file, key] = _Piece(path, key, self._handles[file].get_slice(key))
            except (OSError, SafetensorError, ValueError, MemoryError) as error:
                raise CheckpointError(f"{path} cannot be read: {error}") from None
        return found

    def fill(
        self, target: Tensor, parameter: SavedParameter, state: str, start: int = 0, cut: SavedCut | None = None
    ) -> None:
        """Read elements ``start`` to ``start + target.numel()`` of a state into the flat ``target``, in its dtype.

        Args:
            cut: the slice of the parameter whose elements are counted, however those in the files are cut.
        """
        end = start + target.numel()
        for fragment in parameter.fragments:
            if fragment.cut != cut:
                self._fill_from_slice(target, parameter, state, fragment, start, cut)
                continue
            low, high = max(start, fragment.start), min(end, fragment.start + fragment.numel)
            if low < high:
                shift = fragment.offset - fragment.start
                values = self.piece(fragment.file, parameter.states[state]).read(low + shift, high + shift)
                target[low - start : high - start].copy_(values)

    def _fill_from_slice(
        self,
        target: Tensor,
        parameter: SavedParameter,
        state: str,
        fragment: SavedFragment,
        start: int,
        cut: SavedCut | None,
    ) -> None:
        """Copy what a fragment and ``target`` both have of the whole, box by box."""
        shape, dims = parameter.shape, [each.dim for each in (cut, fragment.cut) if each is not None]
        wanted = list(boxes(shape, cut, start, start + target.numel(), *dims))
        shift, end = fragment.offset - fragment.start, fragment.start + fragment.numel
        for low in range(fragment.start, end, _READ_AT_ONCE):
            held = boxes(shape, fragment.cut, low, min(low + _READ_AT_ONCE, end), *dims)
            pairs = [(box, into, part) for box in held for into in wanted if (part := box.part(into)) is not None]
            if not pairs:
                continue
            first = min(box.place(part) for box, _, part in pairs)
            last = max(box.place([(high - 1, high) for _, high in part]) for box, _, part in pairs)
            values = self.piece(fragment.file, parameter.states[state]).read(first + shift, last + 1 + shift)
            for box, into, part in pairs:
                into.view(target, start, part).copy_(box.view(values, first, part))

    def value(self, parameter: SavedParameter, dtype: torch.dtype | None = None, cut: SavedCut | None = None) -> Tensor:
        """The whole parameter, or a slice, in its shape; floating-point values in ``dtype`` if given."""
        key = parameter.states[parameter.value_state]
        stored = dtype or torch.float32
        if parameter.fragments:
            stored = self.piece(parameter.fragments[0].file, key).dtype
        if dtype is not None and stored.is_floating_point:
            stored = dtype
        shape = parameter.shape if cut is None else cut.shape(parameter.shape)
        value = torch.empty(shape, dtype=stored)
        self.fill(value.view(-1), parameter, parameter.value_state, 0, cut)
        return value

    def buffer(self, buffer: SavedBuffer) -> Tensor:
        """A buffer of the module."""
        return self.piece(buffer.file, buffer.key).whole()


class _Piece:
    """One tensor in one file."""

    def __init__(self, path: Path, key: str, view: Any) -> None:
        self.path, self.key, self._view = path, key, view
        self.shape = tuple(view.get_shape())

    @property
    def dtype(self) -> torch.dtype:
        """Dtype on disk."""
        return self.read(0, 0).dtype

    def _check(self, stop: int) -> None:
        if len(self.shape) != 1 or stop > self.shape[0]:
            raise CheckpointError(
                f"{self.path}: tensor {self.key} has shape {self.shape}, the manifest expects {stop} flat elements"
            )

    def read(self, start: int, stop: int) -> Tensor:
        """Elements ``start`` to ``stop`` of a flat tensor."""
        self._check(stop)
        return self._guard(lambda: self._view[start:stop])

    def whole(self) -> Tensor:
        """All of it."""
        return self._guard(lambda: self._view[:] if self.shape else self._view[...])

    def _guard(self, read: Any) -> Tensor:
        try:
            return read()  # type: ignore[no-any-return]
        except (OSError, SafetensorError, ValueError, RuntimeError, MemoryError) as error:
            raise CheckpointError(f"{self.path}: tensor {self.key} cannot be read: {error}") from None


# -- finding a checkpoint -------------------------------------------------------------------------------------------


def recover(folder: Path) -> Path:
    """``folder``, or its former content if the process died in the moment between two renames of an overwrite."""
    if folder.exists() or not folder.parent.is_dir():
        return folder
    former = [path for path in folder.parent.glob(f".{glob.escape(folder.name)}.old-*") if (path / MANIFEST).is_file()]
    return max(former, key=lambda path: path.stat().st_mtime) if former else folder


def folder_of(given: Any, what: str) -> Path:
    """``given`` as a path.

    Raises:
        CheckpointPlaceError: it is empty or of another type; ``what`` names it.
    """
    if not isinstance(given, str | os.PathLike) or not isinstance(os.fspath(given), str):
        raise CheckpointPlaceError(f"{what} should be the path of a folder, not of type {type(given).__name__}")
    if not os.fspath(given):
        raise CheckpointPlaceError(f"{what} is empty: give the path of a folder ('.' is the current one)")
    if "\0" in os.fspath(given):
        raise CheckpointPlaceError(f"{what} has a NUL character, which no path can have: {os.fspath(given)!r}")
    return Path(given)


def tag_fault(tag: str) -> str:
    """Why a tag, perhaps a stranger's, names no folder inside another; empty when it does."""
    if not tag:
        return "it is empty"
    if not tag.isprintable():
        return "it has a tab, line break, direction mark or another character that cannot be printed"
    path = Path(tag)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        return "it leads out of the folder" if path.parts else "it is the folder itself"
    if len(os.fsencode(tag)) > 1024 or any(len(os.fsencode(part)) > 255 for part in path.parts):
        return "it is too long for the name of a folder"
    return ""


def find_folder(checkpoint_dir: str | Path, tag: str | None = None, latest: str = LATEST) -> Path:
    """The folder that holds the manifest: ``checkpoint_dir`` itself, its ``tag``, or what its file ``latest`` names.

    Raises:
        CheckpointError: there is none.
        CheckpointPlaceError: ``checkpoint_dir`` or ``tag`` cannot be one.
    """
    root = folder_of(checkpoint_dir, "the folder of checkpoints")
    try:
        if root.exists() and not root.is_dir():
            raise CheckpointError(f"{root} is a file and not the folder of checkpoints")
        if tag is None and (root / MANIFEST).is_file():
            return root
        fault = "" if tag is None else tag_fault(str(tag))
        if fault:
            raise CheckpointPlaceError(f"{str(tag)!r} cannot be the tag of a checkpoint: {fault}")
        folder = _latest(root / latest) if tag is None else recover(root / str(tag))
        if folder.exists() and not folder.is_dir():
            raise CheckpointError(f"{folder} is a file and not the folder of a checkpoint")
        return folder
    except FileNotFoundError as error:
        raise CheckpointError(f"{root} holds no checkpoint: neither {MANIFEST} nor a file 'latest'") from error
    except (OSError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{root if tag is not None else root / latest} cannot be read: {error}") from error


def _latest(path: Path) -> Path:
    """The folder that ``latest`` names. A stranger's may be a link to any file, so little of what it holds is told."""
    root = path.parent
    tag = _read_text(path, _LATEST_NBYTES).strip()
    fault = tag_fault(tag)
    folder = root if fault else recover(root / tag)
    if not fault and folder.is_dir():
        return folder
    status = path.lstat()
    told = stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and len(tag) <= 255 and "\n" not in tag
    if fault or not told:
        fault = fault or "there is no such folder"
        named = f"names {tag!r}" if tag and told else "does not name a checkpoint"
        raise CheckpointError(f"{path} {named}: {fault}. Give the tag of a checkpoint, or write its name there")
    return folder


# -- weights where older ones may lie -------------------------------------------------------------------------------


class Hold:
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
            if Hold.lives(path) is not True:
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


@contextmanager
def weights_aside(folder: Path) -> Iterator[Path]:
    """A hidden folder inside ``folder`` for weights that ``publish_weights`` gives their names.

    What killed writers have left there is removed, unless readers depend on it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _remove_aside(folder, _read_by_index(folder))
    aside = folder / f"{_ASIDE}{this_writer()}"
    hold = Hold(aside, made=True)
    try:
        yield aside
    finally:
        hold.close()
        if _read_by_index(folder) != aside.name:  # else it failed between two names: readers find the new ones there
            shutil.rmtree(aside, ignore_errors=True)


def _remove_aside(folder: Path, but: str = "") -> None:
    Hold.remove_unnamed(folder)
    for path in folder.glob(f"{_ASIDE}*"):
        if path.name == but or not path.is_dir() or path.is_symlink():
            continue
        lives = Hold.lives(path)
        here = path.name.rpartition("-")[2].startswith(boot_of()[:8])
        if lives is not True and ((here and lives is False) or untouched(path)):
            shutil.rmtree(path, ignore_errors=True)


def _read_by_index(folder: Path) -> str:
    """The hidden folder that readers are led to, of a writer that was killed while it gave weights their names."""
    named = str(pointed_at(folder) or "")
    if named.startswith(_ASIDE):
        return named.partition("/")[0]
    for name in _ENTRIES:
        with contextlib.suppress(OSError, ValueError, CheckpointError, AttributeError, TypeError, RecursionError):
            if name.endswith(".json"):
                known = json.loads(_read_text(folder / name, 2**28))["weight_map"].values()
                for file in known:
                    if file.startswith(_ASIDE):
                        return str(file.partition("/")[0])
    return ""


def pointed_at(folder: Path) -> Any:
    """What ``config.json`` says to read instead of the usual names of weights; ``None`` where it says nothing."""
    with contextlib.suppress(OSError, ValueError, CheckpointError, AttributeError, RecursionError):
        return json.loads(_read_text(folder / CONFIG, _CONFIG_NBYTES)).get(POINTER)
    return None


def _unpoint(aside: Path, folder: Path, entry: str) -> None:
    """Let ``config.json`` no longer lead readers past ``entry``, which is newer."""
    pointed = pointed_at(folder)
    if pointed is None or pointed == entry:
        return
    if not str(pointed).startswith(_ASIDE):
        warnings.warn(f"{folder / CONFIG} had {POINTER}, which led past {entry}: it was taken out", stacklevel=3)
    content = json.loads(_read_text(folder / CONFIG, _CONFIG_NBYTES))
    del content[POINTER]
    staged = aside / "config"
    staged.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    sync(staged)
    os.replace(staged, folder / CONFIG)


class Beside(Protocol):
    """Files that belong to weights, such as their configuration, and get their names together with them."""

    def begin(self, entry: str) -> None:
        """The new weights are whole at ``entry``, relative to the folder; they get their names next."""

    def end(self) -> None:
        """The new weights have their names."""


def publish_weights(
    aside: Path,
    folder: Path,
    names: Sequence[str],
    index: Mapping[str, Any] | None = None,
    *,
    sole: bool = True,
    beside: Beside | None = None,
) -> None:
    """Give the files ``names`` of ``aside`` their names in ``folder``, and take older weights there away.

    Whenever the process is killed, readers find the former weights or these: names that an older index uses are only
    replaced while an index names the new files where they lie aside, and what readers look for first goes last.

    Args:
        index: content of the index of several files, whose name is made from theirs.
        sole: remove all older weights; else only those that readers would take instead of these, with a warning.
        beside: what is switched with them.
    """
    entry = names[0] if index is None else re.sub(r"-\d{5}-of-\d{5}", "", names[0]) + ".index.json"
    for name in (*names, entry):
        if is_folder(folder / name):
            raise CheckpointError(f"{folder / name} is a folder: move it away, or write somewhere else")
    for name in names:
        sync(aside / name)
    staged: dict[str, Any] = {}
    if index is not None:
        files = {tensor: f"{aside.name}/{name}" for tensor, name in index["weight_map"].items()}
        staged = {**index, "weight_map": files}
    if beside is not None:
        if staged:
            _put_index(aside, aside / entry, staged)
        beside.begin(f"{aside.name}/{entry}")
    if index is not None:
        if any(os.path.lexists(folder / name) for name in names):
            _put_index(aside, folder / entry, staged)
        for name in names:
            _name(aside, folder / name)
        _put_index(aside, folder / entry, index)
    elif beside is not None:
        _name(aside, folder / entry)
    else:
        os.replace(aside / entry, folder / entry)
    sync(folder)
    _retire(folder, entry, [*names, entry], sole=sole)
    if beside is not None:
        beside.end()
    if entry in _ENTRIES:
        _unpoint(aside, folder, entry)
    _remove_aside(folder, aside.name)
    sync(folder)


def _retire(folder: Path, entry: str, kept: Sequence[str], *, sole: bool) -> None:
    """Remove older weights: what readers would take first last, then the files that nothing names any more."""
    first = _ENTRIES[: _ENTRIES.index(entry)] if entry in _ENTRIES else ()
    gone = [name for name in (_ENTRIES if sole else first) if name not in kept and _is_file(folder / name)]
    families = {name.partition(".")[0].partition("-")[0] for name in gone if not sole}
    for name in reversed(gone):
        if not sole:
            told = f"{folder / name} is older, and would be read instead of {entry}: it was removed"
            warnings.warn(told, stacklevel=3)
        (folder / name).unlink(missing_ok=True)
    for path in sorted(folder.iterdir()):
        part = _WEIGHTS.fullmatch(path.name) is not None and path.name not in (*_ENTRIES, *kept) and _is_file(path)
        if part and (sole or path.name.partition("-")[0] in families):
            path.unlink(missing_ok=True)


def is_folder(path: Path) -> bool:
    """Whether a folder itself, no link to one, has the name."""
    return path.is_dir() and not path.is_symlink()


def _is_file(path: Path) -> bool:
    return os.path.lexists(path) and not is_folder(path)


def _put_index(aside: Path, path: Path, content: Mapping[str, Any]) -> None:
    staged = aside / "index"
    staged.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    sync(staged)
    os.replace(staged, path)


def _name(aside: Path, path: Path) -> None:
    """Name a file that lies aside, and leave it there too where the file system lets a file have two names."""
    second = aside / "named"
    try:
        os.link(aside / path.name, second)
    except OSError:
        second = aside / path.name
    os.replace(second, path)


def sync(path: Path) -> None:
    """Make a file, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot sync a folder
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -- whole fp32 weights ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LazyTensor:
    """A parameter that is read when ``contiguous()`` is called."""

    files: TensorFiles
    parameter: SavedParameter
    dtype: torch.dtype = torch.float32

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.parameter.shape)

    def numel(self) -> int:
        return self.parameter.numel

    def contiguous(self) -> Tensor:
        return self.files.value(self.parameter, self.dtype)


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Any]:
    """Whole weights on the CPU, floating-point ones in fp32, with buffers; tied names share one tensor.

    Args:
        checkpoint_dir: folder given to ``save_checkpoint``, or the checkpoint's own.
        tag: default what ``latest`` names.
        exclude_frozen_parameters: leave out what did not train.
        lazy_mode: parameters are objects whose ``contiguous()`` reads them.

    Raises:
        CheckpointError: it is missing, incomplete or damaged.
    """
    return _whole_state(checkpoint_dir, tag, exclude_frozen_parameters, lazy_mode, torch.float32)


def _whole_state(
    checkpoint_dir: str | Path, tag: str | None, exclude_frozen_parameters: bool, lazy_mode: bool, dtype: torch.dtype
) -> dict[str, Any]:
    manifest, files = _opened(checkpoint_dir, tag)
    state: dict[str, Any] = {}
    for name, parameter in manifest.parameters.items():
        if parameter.trainable or not exclude_frozen_parameters:
            state[name] = LazyTensor(files, parameter, dtype) if lazy_mode else files.value(parameter, dtype)
    for name, buffer in manifest.buffers.items():
        value = files.buffer(buffer)
        state[name] = value.to(dtype) if value.is_floating_point() else value
    state.update({alias: state[name] for alias, name in manifest.tied.items() if name in state})
    return state


def _opened(checkpoint_dir: str | Path, tag: str | None) -> tuple[Manifest, TensorFiles]:
    """A whole checkpoint: ours, or where ds_hf is at hand that of another library."""
    foreign = _foreign(checkpoint_dir, tag)
    if foreign is not None:
        foreign.check()
        return foreign.manifest, foreign.files
    manifest = read_manifest(find_folder(checkpoint_dir, tag))
    manifest.check_files()
    files = TensorFiles(manifest.folder)
    manifest.check_tensors(files)
    manifest.check_sums()
    return manifest, files


def _foreign(checkpoint_dir: str | Path, tag: str | None) -> Any:
    """The opened checkpoint if another library wrote it."""
    try:
        from ds_hf.checkpoint.formats import locate, open_folder
        from ds_hf.checkpoint.source import Kind
    except ImportError:
        return None
    try:
        kind, folder = locate(checkpoint_dir, tag)
    except (CheckpointError, OSError):  # the search for ours says what is wrong
        return None
    return None if kind in (Kind.DS_HF, Kind.HF) else open_folder(folder)


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | Path, tag: str | None = None
) -> nn.Module:
    """Give ``model`` the checkpoint's weights, on the CPU, each in the dtype that it has there, and return it.

    A model that an engine holds becomes an ordinary one; destroy that engine before using the model.

    Raises:
        CheckpointError: the checkpoint is unusable, or a shape does not fit.
    """
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    loaded: set[int] = set()
    for name, param in model.named_parameters(remove_duplicate=False):
        value = state.get(name)
        if value is None or id(param) in loaded:
            continue
        shape = tuple(getattr(param, "ds_shape", param.shape))
        if shape != tuple(value.shape):
            raise CheckpointError(f"{name} has shape {shape} in the model and {tuple(value.shape)} in the checkpoint")
        loaded.add(id(param))
        if hasattr(param, "_ds_home"):
            param._ds_home.leave(param)
        param.data = value.to(param.dtype, copy=True)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name in state:
            buffer.copy_(state[name])
    return model.cpu()


def to_torch_tensor(
    state_dict: Mapping[str, Any], return_empty_tensor: bool = False, dtype: str | torch.dtype | None = None
) -> dict[str, Tensor]:
    """Tensors out of a state dict that may be lazy; names that shared one still do.

    Args:
        return_empty_tensor: uninitialized tensors of the same shapes, without reading any.
        dtype: of floating-point tensors, such as ``"bf16"``; default as they are.

    Raises:
        ValueError: it is not a dtype of weights.
    """
    wanted = None if dtype is None else _dtype(dtype)
    made: dict[int, Tensor] = {}
    for value in state_dict.values():
        if id(value) in made:
            continue
        kind = value.dtype if wanted is None or not value.dtype.is_floating_point else wanted
        made[id(value)] = torch.empty(value.shape, dtype=kind) if return_empty_tensor else value.contiguous().to(kind)
    return {name: made[id(value)] for name, value in state_dict.items()}


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """``convert_zero_checkpoint_to_state_dict`` with ``dtype="fp32"``."""
    convert_zero_checkpoint_to_state_dict(
        checkpoint_dir, output_dir, "fp32", max_shard_size, safe_serialization, tag, exclude_frozen_parameters
    )


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    dtype: str | torch.dtype = "fp32",
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write whole weights as transformers reads them, one shard in memory at a time.

    Args:
        output_dir: a folder, or the path of one file that ends in ``.bin``, ``.pt``, ``.pth`` or ``.safetensors``.
        dtype: of floating-point weights: ``"fp32"``, ``"fp16"``, ``"bf16"``.
        max_shard_size: such as ``"5GB"``; larger weights are split, with an index beside them. Not for one file.
        safe_serialization: safetensors instead of pickled files, in a folder.

    Raises:
        ValueError: ``dtype`` or ``max_shard_size`` is neither of these.
    """
    out = folder_of(output_dir, "the output")
    state = _whole_state(checkpoint_dir, tag, exclude_frozen_parameters, True, _dtype(dtype))
    _refuse_links(out, Path(checkpoint_dir))
    if out.suffix in (".bin", ".pt", ".pth", ".safetensors"):
        with weights_aside(out.parent) as aside:
            _write_shard(aside / out.name, list(state), state)
            publish_weights(aside, out.parent, [out.name], sole=False)
        return
    stem, suffix = ("model", ".safetensors") if safe_serialization else ("pytorch_model", ".bin")
    shards = list(_split(state, _nbytes(max_shard_size)))
    with weights_aside(out) as aside:
        if len(shards) == 1:
            _write_shard(aside / f"{stem}{suffix}", shards[0], state)
            publish_weights(aside, out, [f"{stem}{suffix}"])
            return
        index: dict[str, str] = {}
        for number, names in enumerate(shards, 1):
            file = f"{stem}-{number:05d}-of-{len(shards):05d}{suffix}"
            index.update(dict.fromkeys(_write_shard(aside / file, names, state), file))
        total = sum(_size_of(value) for value in {id(state[name]): state[name] for name in index}.values())
        content = {"metadata": {"total_size": total}, "weight_map": index}
        publish_weights(aside, out, list(dict.fromkeys(index.values())), content)


def _refuse_links(out: Path, checkpoint: Path) -> None:
    """A stranger's folder may have a link where the output is likely to be wanted, to files that are not his."""
    home = checkpoint.absolute()
    for path in (out.absolute(), *out.absolute().parents):
        if home in path.parents and path.is_symlink():
            raise CheckpointError(f"{path} is a link out of the checkpoint: write somewhere else")


def _dtype(given: str | torch.dtype) -> torch.dtype:
    found = given if isinstance(given, torch.dtype) else _DTYPES.get(given.lower())
    if found is None or found not in _DTYPES.values():
        raise ValueError(f"{given!r} is not a dtype of weights: use fp32, fp16 or bf16")
    return found


def _nbytes(text: str | int | None) -> float:
    if text is None:
        return math.inf
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B)\s*", text, re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is not a size such as 5GB, 500MB or 2GiB")
    return float(match[1]) * _UNITS[match[2].upper()]


def _size_of(value: Any) -> int:
    return int(value.numel()) * int(value.dtype.itemsize)


def _split(state: Mapping[str, Any], limit: float) -> Iterator[list[str]]:
    """Names in order, cut where the next tensor would exceed ``limit``; tied names stay with their tensor."""
    together: dict[int, list[str]] = {}
    for name, value in state.items():
        together.setdefault(id(value), []).append(name)
    shard: list[str] = []
    held = 0
    for names in together.values():
        size = _size_of(state[names[0]])
        if shard and held + size > limit:
            yield shard
            shard, held = [], 0
        shard += names
        held += size
    yield shard


def _write_shard(path: Path, names: list[str], state: Mapping[str, Any]) -> list[str]:
    """Write the tensors of ``names`` and return the names under which they are in the file."""
    made: dict[int, Tensor] = {}
    for name in names:
        if id(state[name]) not in made:
            made[id(state[name])] = state[name].contiguous()
    content = {name: made[id(state[name])] for name in names}
    if path.suffix != ".safetensors":
        torch.save(content, path)
        return names
    first: dict[int, str] = {}
    metadata = {"format": "pt"}
    for name, value in content.items():
        if first.setdefault(id(value), name) != name:
            metadata[name] = first[id(value)]  # as safetensors.torch.load_model wants it
    save_file({name: content[name] for name in first.values()}, path, metadata)
    return list(first.values())


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Turn a ds_hf checkpoint into whole weights.")
    parser.add_argument("checkpoint_dir", help="folder given to save_checkpoint (it holds 'latest'), or the tag's own")
    parser.add_argument("output", help="folder for model.safetensors, or the path of one .bin or .safetensors file")
    parser.add_argument("-t", "--tag", help="default: what 'latest' names")
    parser.add_argument("--dtype", default="fp32", help="fp32 (the default), fp16 or bf16")
    parser.add_argument("--max_shard_size", "--max-shard-size", default="5GB", help="default: 5GB")
    parser.add_argument("--safe_serialization", "--safe-serialization", action="store_true", help="the default")
    parser.add_argument("--bin", action="store_true", help="write pytorch_model.bin in the folder instead")
    parser.add_argument("--exclude_frozen_parameters", "--exclude-frozen-parameters", action="store_true")
    parser.add_argument("-d", "--debug", action="store_true", help="show the traceback of an error")
    args = parser.parse_args(arguments)
    try:
        convert_zero_checkpoint_to_state_dict(
            args.checkpoint_dir,
            args.output,
            args.dtype,
            args.max_shard_size,
            safe_serialization=not args.bin,
            tag=args.tag,
            exclude_frozen_parameters=args.exclude_frozen_parameters,
        )
    except (CheckpointError, OSError, ValueError) as error:
        if args.debug:
            raise
        sys.stderr.write(printable(f"zero_to_fp32: {error}\n"))
        return 1
    sys.stdout.write(printable(f"wrote {args.output}\n"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
