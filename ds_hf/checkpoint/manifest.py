"""Reading the manifest of a checkpoint; nothing that it says is believed before it is checked.

Names of files stay inside the folder, the fragments of a parameter cover it exactly once, no element is used twice, and
no tensor is larger than the files that hold it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_hf.checkpoint.boxes import cover_fault
from ds_hf.checkpoint.checksum import checksum_of_file
from ds_hf.checkpoint.format import (
    FORMAT,
    MANIFEST,
    ORDERED_VERSION,
    SLICED_VERSION,
    VERSION,
    SavedBuffer,
    SavedCut,
    SavedFragment,
    SavedParameter,
)
from ds_hf.checkpoint.places import find_folder
from ds_hf.checkpoint.tensors import TensorFiles
from ds_hf.errors import CheckpointError
from ds_hf.regular_files import check_regular, read_regular

__all__ = ["Manifest", "open_own", "read_manifest", "sealed"]

_OF_WEIGHTS = ("model_config", "blocks", "scalings")  # entries that hold of the weights wherever these lie
_MANIFEST_NBYTES = 2**22  # that a manifest may always have; more in proportion to the tensors


@dataclass(frozen=True)
class Manifest:
    """A checked manifest.

    Attributes:
        extra: the JSON itself, for what is not about tensors; other formats put in what they know of it. Loading asks
            for ``counters`` (global_steps, global_samples, skipped_steps, micro_steps), ``groups`` (lists of names),
            ``optimizer`` (class, whole) and ``parameters`` (by name, ``dtype`` in the model). All may be missing.
    """

    folder: Path
    world_size: int
    parameters: dict[str, SavedParameter]
    buffers: dict[str, SavedBuffer]
    tied: dict[str, str]
    excluded: frozenset[str]
    files: dict[str, int]
    extra: dict[str, Any]

    @property
    def of_weights(self) -> dict[str, Any]:
        """What is said of the weights besides their values, and goes along with them into another checkpoint."""
        return {key: self.extra[key] for key in _OF_WEIGHTS if isinstance(self.extra.get(key), dict)}

    def refuse_blocks(self, names: Iterable[str]) -> None:
        """Raise ``CheckpointError`` where one of ``names`` is blocks of few bits, which only an engine reads."""
        found = [name for name in names if name in (self.extra.get("blocks") or {})]
        if found:
            raise CheckpointError(
                f"{self.folder}: {found[0]} and {len(found) - 1} more are blocks of 8 or 4 bits, and not weights: load "
                "the checkpoint into an engine and call save_16bit_model(), or leave out what is frozen "
                "(exclude_frozen_parameters)"
            )

    def size_faults(self) -> Iterator[str]:
        """Files that are missing or have another size than when they were written."""
        for name, nbytes in self.files.items():
            path = self.folder / name
            try:
                found = check_regular(path)
            except FileNotFoundError:
                yield f"{path} is missing: the checkpoint is incomplete"
            except OSError as error:
                yield f"{path} cannot be read: {error.strerror or error}"
            else:
                if found != nbytes:
                    yield f"{path} has {found} bytes where {nbytes} were written: the checkpoint is damaged"

    def sum_fault(self, name: str) -> str:
        """What is wrong with the content of a file, empty if it has its checksum or none was written. Reads all."""
        known, path = self.extra.get("checksums"), self.folder / name
        if not isinstance(known, dict) or name not in known:  # written before there were any
            return ""
        try:
            if checksum_of_file(path) == known[name]:
                return ""
        except OSError as error:
            return f"{path} cannot be read: {error}"
        return f"{path} does not have the checksum that was written: the checkpoint is damaged"

    def check_files(self) -> None:
        """Raise ``CheckpointError`` for the first file that is missing or has another size than when it was written."""
        _refuse(self.size_faults())

    def check_sums(self) -> None:
        """Raise ``CheckpointError`` for the first file that has not the checksum it was written with. Reads all."""
        _refuse(map(self.sum_fault, self.files))

    def check_tensors(self, files: TensorFiles) -> None:
        """Raise ``CheckpointError`` if a tensor that the manifest speaks of is not there or too short."""
        for parameter in self.parameters.values():
            for fragment in parameter.fragments:
                for key in parameter.states.values():
                    files.piece(fragment.file, key).check_length(fragment.offset + fragment.numel)
        for buffer in self.buffers.values():
            shape = files.piece(buffer.file, buffer.key).shape
            if shape != buffer.shape:
                raise CheckpointError(
                    f"{self.folder / buffer.file}: buffer {buffer.name} has shape {shape}, the manifest says "
                    f"{buffer.shape}"
                )


def _refuse(faults: Iterable[str]) -> None:
    fault = next(filter(None, faults), "")
    if fault:
        raise CheckpointError(fault)


def read_manifest(folder: str | Path) -> Manifest:
    """Read and check the manifest of one checkpoint folder.

    Raises:
        CheckpointError: there is none, or it contradicts itself.
    """
    path = Path(folder) / MANIFEST
    try:
        text = read_regular(path, _MANIFEST_NBYTES + _nbytes_in(path.parent)).decode("utf-8")
        content = json.loads(text, object_pairs_hook=_without_doubles)
        _check_seal(text, content)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing: the folder is not a complete ds_hf checkpoint (its saving was interrupted, or "
            "another library wrote it)"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {getattr(error, 'strerror', '') or error}") from error
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


def _nbytes_in(folder: Path) -> int:
    """Bytes of tensors in a folder."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors") if path.is_file())


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
        if type(version) is not int or version not in (VERSION, SLICED_VERSION, ORDERED_VERSION):
            self._fail(f"it has version {version!r}; this ds_hf reads {VERSION} to {ORDERED_VERSION}: update ds_hf")
        if version != VERSION:
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
        dtype = self._of(str, entry.get("dtype", ""), f"dtype of {name}")
        order = [self._count(n, f"order of {name}") for n in self._of(list, entry.get("order", []), f"order of {name}")]
        if order and sorted(order) != [*range(len(shape))]:
            self._fail(f"the order of {name} is not one of its {len(shape)} dims")
        return SavedParameter(
            name, shape, trainable, states, tuple(fragments), scalars, order=tuple(order), dtype=dtype
        )

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


def open_own(checkpoint_dir: str | Path, tag: str | None = None) -> tuple[Manifest, TensorFiles]:
    """A checkpoint of ds_hf that is whole: every file was read and has its checksum.

    Raises:
        CheckpointError: it is missing, incomplete or damaged.
    """
    manifest = read_manifest(find_folder(checkpoint_dir, tag))
    manifest.check_files()
    files = TensorFiles(manifest.folder)
    manifest.check_tensors(files)
    manifest.check_sums()
    return manifest, files
