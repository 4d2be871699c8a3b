"""What the files ``*_model_states.pt`` say, and whole parameters put together of what model-parallel ranks hold.

Each tensor-parallel rank has a slice of some parameters, each stage of a pipeline has parameters of its own. ``Found``
collects them as a manifest does: where the elements of each parameter lie, and nothing is copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_hf.engine.checkpoint.deepspeed_grid import Grid
from ds_hf.engine.checkpoint.deepspeed_layout import count_of
from ds_hf.engine.checkpoint.deepspeed_options import of
from ds_hf.engine.checkpoint.deepspeed_pickle import load_pickled
from ds_hf.engine.checkpoint.deepspeed_slices import INFO, Place, Rules, given_info
from ds_hf.engine.checkpoint.interface import dtype_name
from ds_hf.engine.checkpoint.source import Kind, MappedFiles, Source
from ds_hf.engine.checkpoint.zero_to_fp32 import Manifest, SavedBuffer, SavedFragment, SavedParameter, cover_fault
from ds_hf.errors import CheckpointError
from ds_hf.log import logger

__all__ = ["Found", "Local", "ModelStates"]

_OWN_KEYS = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names",
    "csr_tensor_module_names", "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size",
    "checkpoint_parallel_dimensions", "ds_config", "ds_version", "num_experts",
}  # fmt: skip
_ALIKE = ("global_steps", "global_samples", "skipped_steps", "dp_world_size", "mp_world_size")
_ROUNDING = 0.01  # of the largest value: by more, copies on tensor-parallel ranks are not of the same parameter


@dataclass(frozen=True)
class Local:
    """One parameter as one model-parallel rank has it: the shape there, and rows that count in it."""

    shape: tuple[int, ...]
    states: dict[str, str]
    rows: list[SavedFragment]
    scalars: dict[str, Any] = field(default_factory=dict)


@dataclass
class Found:
    """What is put into the manifest.

    Attributes:
        keys: of parameters that were slices what DeepSpeed's universal folders say of them.
        checks: comparisons that read tensors, for ``Source.check``.
        counts_in_tensors: the optimizer keeps its step as a tensor, as torch's do.
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

    def add(self, name: str, held: Sequence[Local], place: Place | None, *, trainable: bool) -> None:
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
                    self.tensors[file, f"{name}.{state}"] = self.tensors[file, local.states[state]]
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
        self, name: str, held: Sequence[Local], place: Place, states: dict[str, str]
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


def _clipped(rows: Sequence[SavedFragment], kept: int, cut: Any) -> list[SavedFragment]:
    """The part of rows that counts in the first ``kept`` elements."""
    found = []
    for row in rows:
        numel = min(row.numel, kept - row.start)
        if numel > 0:
            found.append(SavedFragment(row.file, row.start, row.offset, numel, cut))
    return found


class ModelStates:
    """The models' files of a folder, loaded.

    Attributes:
        content: by model-parallel rank, then by data-parallel rank.
        pipe, tensor: stages of the pipeline, tensor-parallel ranks.

    Raises:
        CheckpointError: they do not belong together.
    """

    def __init__(self, folder: Path, grid: Grid, *, assumed: bool = False) -> None:
        self.folder, self.grid = folder, grid
        self.content = [[load_pickled(folder / name) for name in row] for row in grid.models]
        self.first: dict[str, Any] = self.content[0][0]
        self._check_alike()
        self.pipe, self.tensor = self._degrees()
        self.world_size = count_of(self.first.get("dp_world_size", 1))
        self.info = given_info(folder, self.first.get(INFO))
        self.rules = Rules(self.info, folder, self.tensor, assumed=assumed)

    def _fail(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.folder}: {reason}")

    def _check_alike(self) -> None:
        for row, names in zip(self.content, self.grid.models, strict=True):
            for state, name in zip(row, names, strict=True):
                for key in _ALIKE:
                    if state.get(key) != self.first.get(key):
                        raise self._fail(
                            f"{key} is {self.first.get(key)!s:.40} in {self.grid.models[0][0]} and "
                            f"{state.get(key)!s:.40} in {name}: the files are of different saves"
                        )

    def _degrees(self) -> tuple[int, int]:
        ranks = len(self.content)
        known = self.first.get("checkpoint_parallel_dimensions")
        if isinstance(known, Mapping):
            pipe, tensor = count_of(known.get("pp_degree", 1)), count_of(known.get("tp_degree", 1))
        else:
            tensors = {tensor for _, tensor, _ in self.grid.layers}
            tensor = len(tensors) or count_of(self.first.get("mp_world_size", 1)) or 1
            pipe = max(1, ranks // tensor) if tensors else 1
        if pipe * tensor != ranks:
            raise self._fail(
                f"{pipe * tensor} model-parallel ranks wrote it (tensor {tensor}, pipeline {pipe}), but there are "
                f"models of {ranks}: the files of some ranks are missing"
            )
        return pipe, tensor

    def column(self, pipe: int, tensor: int) -> int:
        """Number of a model-parallel rank."""
        return pipe * self.tensor + tensor

    def file(self, column: int) -> str:
        """The first file of a model-parallel rank."""
        return self.grid.models[column][0]

    def module(self, column: int) -> dict[str, Any]:
        """The state dict of a model-parallel rank; empty in a pipeline, which keeps it in files of its layers."""
        found = self.content[column][0].get("module")
        if found is None and self.grid.layers:
            return {}
        return of(dict, found, self.folder / self.file(column), "module")  # type: ignore[no-any-return]

    def shapes(self, column: int) -> list[dict[str, tuple[int, ...]]]:
        """Shapes on a model-parallel rank, by flat tensor."""
        path = self.folder / self.file(column)
        found = self.content[column][0].get("param_shapes")
        if isinstance(found, Mapping):  # one group, in old versions
            found = [found]
        return [
            {str(name): _shape(shape) for name, shape in of(Mapping, each, path, "param_shapes").items()}
            for each in of(list, found, path, "param_shapes")
        ]

    def place(self, name: str, slices: Sequence[tuple[int, ...]]) -> Place | None:
        """See ``Rules.place``; ``None`` where no rank has slices."""
        return None if self.tensor == 1 else self.rules.place(name, slices)

    def common(self) -> dict[str, Any]:
        """What is no tensor and one for all."""
        client = {key: value for key, value in self.first.items() if key not in _OWN_KEYS}
        return {"extra_state": {}, "client_state": client, "lr_scheduler": self.first.get("lr_scheduler")}

    def tied(self) -> dict[str, str]:
        """Further names of parameters, each with the first."""
        found: dict[str, str] = {}
        for pipe in range(self.pipe):
            column = self.column(pipe, 0)
            shared = self.content[column][0].get("shared_params")
            found.update(
                _shared(self.module(column))
                if shared is None
                else {str(alias): str(name) for alias, name in shared.items()}
            )
        return found

    def rest(self, found: Found, tied: Mapping[str, str], extra_state: dict[str, Any]) -> dict[str, SavedBuffer]:
        """Frozen parameters, buffers and extra states: what is not in ``found`` yet."""
        buffers: dict[str, SavedBuffer] = {}
        for pipe in range(self.pipe):
            columns = [self.column(pipe, tensor) for tensor in range(self.tensor)]
            frozen = [self._frozen_shapes(column) for column in columns]
            self._of_module(found, tied, extra_state, columns, frozen[0], buffers)
            self._of_layers(found, pipe, buffers)
            for name in frozen[0]:
                held = [
                    self._frozen(found, name, shapes.get(name), column)
                    for shapes, column in zip(frozen, columns, strict=True)
                ]
                found.add(name, held, self.place(name, [local.shape for local in held]), trainable=False)
        return buffers

    def _frozen_shapes(self, column: int) -> dict[str, tuple[int, ...]]:
        shapes = self.content[column][0].get("frozen_param_shapes") or {}
        return {str(name): _shape(shape) for name, shape in shapes.items()}

    def _of_module(
        self,
        found: Found,
        tied: Mapping[str, str],
        extra_state: dict[str, Any],
        columns: Sequence[int],
        frozen: Mapping[str, Any],
        buffers: dict[str, SavedBuffer],
    ) -> None:
        modules = [self.module(column) for column in columns]
        named = {str(name) for name in self.content[columns[0]][0].get("buffer_names") or ()}
        for name, value in modules[0].items():
            if name in found.parameters or name in tied or name in frozen:
                if isinstance(value, Tensor):
                    found.dtypes[name] = dtype_name(value.dtype)
            elif not isinstance(value, Tensor):
                extra_state[name] = value
            elif name in named:
                self._buffer(found, name, [module.get(name) for module in modules], columns, buffers)
            else:  # at stages 0 and 1 nothing tells frozen parameters from others
                found.dtypes[name] = dtype_name(value.dtype)
                held = [self._whole(found, name, module, c) for module, c in zip(modules, columns, strict=True)]
                found.add(name, held, self.place(name, [local.shape for local in held]), trainable=False)

    def _whole(self, found: Found, name: str, module: dict[str, Any], column: int) -> Local:
        value, file, key = module.get(name), self.file(column), f"module.{name}"
        if not isinstance(value, Tensor):
            raise self._fail(f"{file} does not have {name}, which other ranks have")
        found.tensors[file, key] = value.detach()
        rows = [SavedFragment(file, 0, 0, value.numel())] if value.numel() else []
        return Local(tuple(value.shape), {"weight": key}, rows)

    def _buffer(
        self, found: Found, name: str, values: Sequence[Any], columns: Sequence[int], buffers: dict[str, SavedBuffer]
    ) -> None:
        first = values[0]
        if not all(isinstance(v, Tensor) and v.dtype == first.dtype and torch.equal(v, first) for v in values[1:]):
            found.excluded.add(name)  # each rank has built its own, as one that says where its slice begins
            return
        file = self.file(columns[0])
        found.tensors[file, f"module.{name}"] = first.detach()
        buffers[name] = SavedBuffer(name, tuple(first.shape), file, f"module.{name}")

    def _of_layers(self, found: Found, pipe: int, buffers: dict[str, SavedBuffer]) -> None:
        """Buffers and dtypes in the files of a pipeline's layers, where names lack the number of the layer."""
        if pipe:
            return
        named = {str(n) for row in self.content for n in row[0].get("buffer_names") or ()}
        for layer, tensor, file in self.grid.layers:
            if tensor:
                continue
            for key, value in load_pickled(self.folder / file).items():
                name = f"{layer}.{key}"
                if isinstance(value, Tensor) and name in found.parameters:
                    found.dtypes[name] = dtype_name(value.dtype)
                elif isinstance(value, Tensor) and name in named:
                    found.tensors[file, f"module.{name}"] = value.detach()
                    buffers[name] = SavedBuffer(name, tuple(value.shape), file, f"module.{name}")

    def _frozen(self, found: Found, name: str, shape: tuple[int, ...] | None, column: int) -> Local:
        """A frozen parameter: whole at stage 2, at stage 3 a part on each data-parallel rank, the last one padded."""
        if shape is None:
            raise self._fail(f"{self.file(column)} does not have the frozen {name}, which other ranks have")
        rows, start = [], 0
        key = f"frozen.{name}"
        for file, state in zip(self.grid.models[column], self.content[column], strict=True):
            value = (state.get("frozen_param_fragments") or {}).get(name)
            if not isinstance(value, Tensor) or start >= math.prod(shape):
                continue
            found.tensors[file, key] = value.detach()
            numel = min(value.numel(), math.prod(shape) - start)
            rows.append(SavedFragment(file, start, 0, numel))
            start += numel
        return Local(shape, {"weight": key}, rows)

    def source(
        self,
        kind: Kind,
        found: Found,
        stage: int | None,
        buffers: dict[str, SavedBuffer],
        tied: Mapping[str, str],
        common: dict[str, Any],
        files: Sequence[str],
    ) -> Source:
        """What was found, as any other checkpoint is."""
        order = {name: None for column in range(len(self.content)) for name in self.module(column)}
        parameters = _ordered(found.parameters, list(order))
        nbytes = {name: (self.folder / name).stat().st_size for name in files}
        if sum(p.numel for p in parameters.values()) > sum(nbytes.values()):
            raise self._fail("its parameters are larger than all files together")
        known = {alias: name for alias, name in tied.items() if name in parameters or name in buffers}
        world_size = self.world_size * len(self.content)
        manifest = Manifest(
            self.folder, world_size, parameters, buffers, known, frozenset(found.excluded), nbytes, self._extra(found)
        )
        return Source(kind, manifest, MappedFiles(self.folder, found.tensors), common, stage, tuple(found.checks))

    def _extra(self, found: Found) -> dict[str, Any]:
        config = self.first.get("ds_config")
        settings = config if isinstance(config, dict) else {}
        steps = count_of(self.first.get("global_steps", 0))
        accumulation = settings.get("gradient_accumulation_steps", 1)
        extra: dict[str, Any] = {
            "written_by": {"deepspeed": str(self.first.get("ds_version", "unknown"))},
            "counters": {
                "global_steps": steps,
                "global_samples": count_of(self.first.get("global_samples", 0)),
                "skipped_steps": count_of(self.first.get("skipped_steps", 0)),
                "micro_steps": steps * (accumulation if isinstance(accumulation, int) else 1),
            },
            "optimizer": {
                "class": str((settings.get("optimizer") or {}).get("type", "")),
                "whole": False,
                "counts_in_tensors": found.counts_in_tensors,
            },
            "groups": found.groups or None,
            "parameters": {name: {"dtype": dtype} for name, dtype in found.dtypes.items()},
        }
        if len(self.content) > 1:
            extra["mesh"] = {"pipe": self.pipe, "data": self.world_size, "sequence": 1, "tensor": self.tensor}
        if self.info is not None:
            extra[INFO] = self.info  # of the checkpoint, or what lies beside its files
        if found.keys:
            extra["universal"] = found.keys
            extra["vocabulary"] = [name for name, keys in found.keys.items() if keys.get("vocab_tensor") is True]
        return extra


def _shape(shape: Any) -> tuple[int, ...]:
    sizes = tuple(count_of(n) for n in shape)
    if len(sizes) > 64 or math.prod(sizes) >= 2**63:
        raise ValueError("it has an impossible shape")
    return sizes


def _shared(module: Mapping[str, Any]) -> dict[str, str]:
    """Further names of tensors that are there under another name; without ZeRO nothing else tells of tied weights."""
    first: dict[Any, str] = {}
    found: dict[str, str] = {}
    for name, value in module.items():
        if isinstance(value, Tensor) and value.numel():
            known = first.setdefault((value.data_ptr(), value.shape, value.stride()), name)
            if known != name:
                found[name] = known
    return found


def _ordered(parameters: dict[str, SavedParameter], names: list[str]) -> dict[str, SavedParameter]:
    place = {name: index for index, name in enumerate(names)}
    return dict(sorted(parameters.items(), key=lambda item: place.get(item[0], len(place))))
