"""Whole parameters put together of what DeepSpeed's model-parallel ranks hold.

Each tensor-parallel rank has a slice of some parameters, each stage of a pipeline has parameters of its own. ``Found``
collects them as a manifest does: where the elements of each parameter lie, and nothing is copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_hf.checkpoint.boxes import cover_fault
from ds_hf.checkpoint.deepspeed.slices import INFO, SlicePlace
from ds_hf.checkpoint.format import SavedCut, SavedFragment, SavedParameter
from ds_hf.errors import CheckpointError
from ds_hf.log import logger

__all__ = ["ExpertTensor", "Found", "Local", "TensorsInRow", "Written"]

_ROUNDING = 0.01  # of the largest value: by more, copies on tensor-parallel ranks are not of the same parameter


@dataclass(frozen=True)
class Local:
    """One parameter as one model-parallel rank has it: the shape there, and rows that count in it."""

    shape: tuple[int, ...]
    states: dict[str, str]
    rows: list[SavedFragment]
    scalars: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ExpertTensor:
    """What the file of one expert has under one name."""

    file: str
    name: str
    expert: int
    value: Tensor


@dataclass(frozen=True)
class Written:
    """Elements from ``start`` on of a parameter, or of a slice of it, that were trained are those of a file as well."""

    name: str
    start: int
    cut: SavedCut | None
    tensor: ExpertTensor


@dataclass
class Found:
    """What is put into the manifest.

    Attributes:
        keys: of parameters that were slices what DeepSpeed's universal folders say of them.
        checks: comparisons that read tensors, for ``Source.check``.
        counts_in_tensors: the optimizer keeps its step as a tensor, as torch's do.
        written: what is in two files.
    """

    folder: Path
    parameters: dict[str, SavedParameter] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    tensors: dict[tuple[str, str], Any] = field(default_factory=dict)
    groups: list[list[str]] = field(default_factory=list)
    excluded: set[str] = field(default_factory=set)
    keys: dict[str, dict[str, Any]] = field(default_factory=dict)
    checks: list[Callable[[], None]] = field(default_factory=list)
    counts_in_tensors: bool = False
    written: list[Written] = field(default_factory=list)

    def add(self, name: str, held: Sequence[Local], place: SlicePlace | None, *, trainable: bool) -> None:
        """One parameter of which the tensor-parallel ranks have ``held``; ``place`` is ``None`` for one rank alone."""
        for local in held:
            self._check_rows(name, local)
        first = held[0]
        if place is None:
            self.parameters[name] = SavedParameter(
                name, first.shape, trainable, first.states, tuple(first.rows), first.scalars
            )
            return
        self._check_steps(name, held)
        self.keys[name] = place.keys
        states = self._alike_keys(name, held)
        if place.made is not None:
            rows, states = self._made(name, held, place, states)
        elif place.cuts[0] is None and place.same:
            rows = _clipped(first.rows, place.kept[0], None)
            if len(held) > 1:
                self.checks.append(lambda: self._compare(name, held, states))
        else:
            pairs = zip(held, place.cuts, place.kept, strict=True)
            rows = [row for local, cut, kept in pairs if cut is not None for row in _clipped(local.rows, kept, cut)]
        fault = cover_fault(place.shape, rows)
        if fault:
            raise CheckpointError(f"{self.folder}: the slices of {name} {fault}")
        self.parameters[name] = SavedParameter(name, place.shape, trainable, states, tuple(rows), first.scalars)

    def _check_rows(self, name: str, local: Local) -> None:
        held = sum(row.numel for row in local.rows)
        if held != math.prod(local.shape):
            kind = "frozen " if "weight" in local.states else ""
            of = f"the {kind}{name}" if kind else name
            raise CheckpointError(f"{self.folder}: the ranks hold {held} elements of {of} {list(local.shape)}")

    def _check_steps(self, name: str, held: Sequence[Local]) -> None:
        """The state of one moment: ranks that were saved after different numbers of steps do not belong together."""
        for rank, local in enumerate(held):
            for key, value in local.scalars.items():
                if key in held[0].scalars and value != held[0].scalars[key]:
                    raise CheckpointError(
                        f"{self.folder}: {key} of {name} is {held[0].scalars[key]} on tensor-parallel rank 0 and "
                        f"{value} on rank {rank}: the files are of different saves"
                    )

    def _alike_keys(self, name: str, held: Sequence[Local]) -> dict[str, str]:
        """The same tensor keys for the files of all ranks."""
        if all(local.states == held[0].states for local in held):
            return held[0].states
        states = list(dict.fromkeys(state for local in held for state in local.states))
        for local in held:
            for state in states:
                for file in {row.file for row in local.rows}:
                    if state not in local.states:
                        raise CheckpointError(f"{self.folder / file}: {name} has no {state}, other ranks have")
                    key, own = (file, f"{name}.{state}"), self.tensors[file, local.states[state]]
                    if self.tensors.get(key, own) is not own:
                        raise CheckpointError(f"{self.folder / file} has {name} in more than one flat tensor")
                    self.tensors[key] = own
        return {state: f"{name}.{state}" for state in states}

    def _slice(self, local: Local, key: str) -> Tensor:
        """What a rank has of one state, flat."""
        parts = []
        for row in local.rows:
            flat = self.tensors[row.file, key].reshape(-1)
            if flat.numel() < row.offset + row.numel:
                raise CheckpointError(
                    f"{self.folder / row.file}: tensor {key} has {flat.numel()} elements, but {row.offset + row.numel} "
                    "are expected"
                )
            parts.append(flat[row.offset : row.offset + row.numel])
        return torch.cat(parts) if parts else torch.empty(0)

    def _made(
        self, name: str, held: Sequence[Local], place: SlicePlace, states: dict[str, str]
    ) -> tuple[list[SavedFragment], dict[str, str]]:
        """A parameter that is rebuilt when it is read."""
        file = held[0].rows[0].file if held[0].rows else ""
        keys = {state: f"{name}.{state} of all ranks" for state in states}
        make, numel = place.made, math.prod(place.shape)
        assert make is not None

        def maker(state: str) -> Callable[[], Tensor]:
            return lambda: make([self._slice(local, states[state]) for local in held], state)

        for state, key in keys.items():
            dtype = self.tensors[file, states[state]].dtype
            made = _Made(f"{self.folder}: {name} ({state})", numel, dtype, maker(state))
            self.tensors[file, key] = made
            self.checks.append(made.check)
        return [SavedFragment(file, 0, 0, numel)] if numel else [], keys

    def _compare(self, name: str, held: Sequence[Local], states: dict[str, str]) -> None:
        """What is the same on all tensor-parallel ranks."""
        for state, key in states.items():
            first = self._slice(held[0], key)
            for rank, local in enumerate(held[1:], 1):
                other = self._slice(local, key)
                if torch.equal(first, other):
                    continue
                apart = float((first - other).abs().max())
                where = f"{self.folder}: {name} ({state}) differs by {apart:.3g} on tensor-parallel ranks 0 and {rank}"
                if not apart <= _ROUNDING * float(first.abs().max()):
                    raise CheckpointError(
                        f"{where}: either it is a slice and {INFO} is wrong, or the files do not belong together"
                    )
                logger.warning("%s: that of rank 0 is taken", where)


class _Made:
    """A tensor that is made when some of it is read; seen flat."""

    def __init__(self, what: str, numel: int, dtype: torch.dtype, make: Callable[[], Tensor]) -> None:
        self._what, self._numel, self._dtype, self._make = what, numel, dtype, make

    def get_shape(self) -> list[int]:
        return [self._numel]

    def __getitem__(self, place: slice) -> Tensor:
        start, stop, _ = place.indices(self._numel)
        if start >= stop:
            return torch.empty(0, dtype=self._dtype)
        try:
            return self._make()[start:stop]
        except (ValueError, RuntimeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{self._what}: {error}") from None

    def check(self) -> None:
        """Make it once."""
        if self._numel:
            _ = self[0 : self._numel]


class TensorsInRow:
    """Several tensors seen as one flat one, each from its place on; what lies between them is not there."""

    def __init__(self, parts: Sequence[tuple[int, Tensor]]) -> None:
        self._parts = [(start, part.reshape(-1)) for start, part in parts]
        self.dtype = parts[0][1].dtype

    def get_shape(self) -> list[int]:
        start, last = self._parts[-1]
        return [start + last.numel()]

    def __getitem__(self, place: slice) -> Tensor:
        start, stop, _ = place.indices(self.get_shape()[0])
        for first, part in self._parts:
            if first <= start and stop <= first + part.numel():
                return part[start - first : stop - first]
        raise ValueError(f"elements {start} to {stop} lie in no tensor")


def _clipped(rows: Sequence[SavedFragment], kept: int, cut: Any) -> list[SavedFragment]:
    """The part of rows that counts in the first ``kept`` elements."""
    found = []
    for row in rows:
        numel = min(row.numel, kept - row.start)
        if numel > 0:
            found.append(SavedFragment(row.file, row.start, row.offset, numel, cut))
    return found
