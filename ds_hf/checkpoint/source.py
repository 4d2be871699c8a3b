"""A checkpoint that can be read, in any format: a manifest, the tensors behind it, and what is not tensors.

Other libraries' formats are flat tensors in files too, so each reader makes a ``Manifest`` of what it finds; loading,
exporting and inspecting know nothing else. Invariant: a ``Source`` reads tensors when they are asked for, and nothing
in its files is believed before ``check`` has compared it with the bytes that are there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_hf.checkpoint.format import SavedBuffer, SavedParameter
from ds_hf.checkpoint.manifest import Manifest
from ds_hf.checkpoint.tensors import StoredTensor, TensorFiles
from ds_hf.dtypes import torch_dtype
from ds_hf.errors import CheckpointError

__all__ = ["CheckpointKind", "MappedFiles", "Report", "Source", "TensorPiece", "Weight", "model_dtypes"]

Report = Callable[[int, int], None]  # bytes done, bytes in all


class CheckpointKind(str, Enum):
    """Who wrote a checkpoint."""

    DS_HF = "ds_hf"
    DEEPSPEED = "deepspeed"
    UNIVERSAL = "universal"
    DCP = "dcp"
    HF = "hf"


@dataclass(frozen=True)
class Source:
    """An opened checkpoint.

    Attributes:
        common: ``client_state``, ``lr_scheduler`` and ``extra_state``; with an optimizer also ``loss_scaler`` and
            ``param_groups``, as ``save_checkpoint`` writes them.
        stage: ZeRO stage that wrote it, where that is known.
        checks: what a reader can only compare by reading tensors.
    """

    kind: CheckpointKind
    manifest: Manifest
    files: TensorFiles
    common: dict[str, Any] = field(default_factory=dict)
    stage: int | None = None
    checks: tuple[Callable[[], None], ...] = ()

    @property
    def folder(self) -> Path:
        return self.manifest.folder

    def check(self, *, sums: bool = True) -> None:
        """Raise ``CheckpointError`` for the first thing that is missing, damaged or too short.

        Args:
            sums: also read all files of which the manifest has checksums: what is written from a damaged checkpoint
                gets checksums of its own, and nothing would tell the damage any more.
        """
        self.manifest.check_files()
        self.manifest.check_tensors(self.files)
        if sums:
            self.manifest.check_sums()
        for check in self.checks:
            check()

    def weights(self) -> Iterator[Weight]:
        """Parameters, then buffers; further names of tied ones are not repeated."""
        dtypes = model_dtypes(self.manifest)
        for name, parameter in self.manifest.parameters.items():
            yield Weight(name, parameter.shape, dtypes.get(name) or self.stored_dtype(parameter), self, parameter)
        for name, buffer in self.manifest.buffers.items():
            yield Weight(name, buffer.shape, self.files.buffer(buffer).dtype, self, buffer)

    def stored_dtype(self, parameter: SavedParameter, state: str | None = None) -> torch.dtype:
        """Dtype on disk of a state, by default of the value."""
        if not parameter.fragments:
            return torch.float32
        key = parameter.states[state or parameter.value_state]
        return self.files.piece(parameter.fragments[0].file, key).dtype

    def state(self, parameter: SavedParameter, state: str) -> Tensor:
        """A whole state, flat, in its dtype."""
        flat = torch.empty(parameter.numel, dtype=self.stored_dtype(parameter, state))
        self.files.fill(flat, parameter, state)
        return flat


@dataclass(frozen=True)
class Weight:
    """A parameter or buffer of a source; ``dtype`` is the one it had in the model."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    source: Source
    saved: SavedParameter | SavedBuffer

    @property
    def is_buffer(self) -> bool:
        return isinstance(self.saved, SavedBuffer)

    def read(self) -> Tensor:
        """The value, as exactly as it is stored."""
        if isinstance(self.saved, SavedBuffer):
            return self.source.files.buffer(self.saved)
        return self.source.files.value(self.saved)


def model_dtypes(manifest: Manifest) -> dict[str, torch.dtype]:
    """Dtypes that parameters had in the model, where the checkpoint tells."""
    entries = manifest.extra.get("parameters")
    if not isinstance(entries, Mapping):
        return {}
    found = {name: torch_dtype(entry.get("dtype")) for name, entry in entries.items() if isinstance(entry, Mapping)}
    return {name: dtype for name, dtype in found.items() if dtype is not None}


class MappedFiles(TensorFiles):
    """Tensors that a reader has already found, by file and key; shaped ones are read as if they were flat."""

    def __init__(self, folder: Path, found: Mapping[tuple[str, str], Any]) -> None:
        super().__init__(folder)
        self._found = dict(found)

    def add(self, file: str, key: str, value: Any) -> None:
        """One more tensor."""
        self._found[file, key] = value

    def piece(self, file: str, key: str) -> StoredTensor:
        known = self._pieces.get((file, key))
        if known is None:
            value = self._found.get((file, key))
            if value is None:
                raise CheckpointError(f"{self.folder / file}: there is no tensor {key}")
            known = self._pieces[file, key] = TensorPiece(self.folder / file, key, value)
        return known


class TensorPiece(StoredTensor):
    """A tensor, or what can be sliced along its first dim like one, seen flat."""

    def __init__(self, path: Path, key: str, value: Any) -> None:
        self.path, self.key, self._view = path, key, value
        self.whole_shape = tuple(value.shape if isinstance(value, Tensor) else value.get_shape())
        self.shape = self.whole_shape

    def check_length(self, stop: int) -> None:
        if stop > math.prod(self.whole_shape):
            raise CheckpointError(
                f"{self.path}: tensor {self.key} has shape {list(self.whole_shape)}, but {stop} elements are expected"
            )

    def read(self, start: int, stop: int) -> Tensor:
        self.check_length(stop)
        if len(self.whole_shape) <= 1:
            return self._guard(
                lambda: self.whole().reshape(-1)[start:stop] if not self.shape else self._cut(start, stop)
            )
        row = max(math.prod(self.whole_shape[1:]), 1)  # only the rows that are asked for
        first = start // row
        rows = self._guard(lambda: self._cut(first, -(-stop // row)))
        return rows.reshape(-1)[start - first * row : stop - first * row]

    def _cut(self, start: int, stop: int) -> Tensor:
        cut: Tensor = self._view[start:stop]
        return cut.detach()

    def whole(self) -> Tensor:
        return self._guard(
            lambda: self._view[...] if isinstance(self._view, Tensor) or not self.shape else self._view[:]
        )
