"""Reading DeepSpeed's universal checkpoints: whole parameters, each state in a file of its own.

    zero/<parameter>/fp32.pt, exp_avg.pt, exp_avg_sq.pt     {"param": tensor, ...}, or the flat tensor alone
    zero/<parameter>/step.pt                                a number
    zero/optimizer_state.pt                                 options of the groups, loss scaler
    mp_rank_*_model_states.pt (at stage 3 zero_pp_rank_*)   what is no optimizer state, as in any of its checkpoints

A folder may have thousands of such files. Masters are looked at when it is opened, for their shapes; moments, and the
checksums of both, when a rank wants their values.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_hf.checkpoint.deepspeed.layout import find_grid, is_model_file
from ds_hf.checkpoint.deepspeed.module import ModelStates
from ds_hf.checkpoint.deepspeed.pickles import (
    SAVE,
    as_step,
    base_groups,
    is_summed,
    load_any,
    load_pickled,
    names_of_groups,
    options_of,
    scaler_of,
)
from ds_hf.checkpoint.deepspeed.read import as_written
from ds_hf.checkpoint.deepspeed.slices import RULES_FILE
from ds_hf.checkpoint.deepspeed.whole import Found, Local
from ds_hf.checkpoint.format import SavedFragment
from ds_hf.checkpoint.scalars import encode_scalar
from ds_hf.checkpoint.source import CheckpointKind, Source
from ds_hf.checkpoint.trust.pickled import check_pickled
from ds_hf.errors import CheckpointError

__all__ = ["LATEST", "OPTIMIZER_STATE", "STATES", "WRITTEN_AS", "is_universal", "read_universal"]

LATEST = "latest_universal"  # beside the folder, as ``latest`` is beside others
STATES = "zero"
OPTIMIZER_STATE = "optimizer_state.pt"
WRITTEN_AS = "ds_hf_file"  # beside a tensor: of which parameter and state it was written, after which step, ``SAVE``
_VALUE = "fp32"


def is_universal(folder: Path) -> bool:
    """Whether ``folder`` is a universal checkpoint."""
    if not (folder / STATES).is_dir():
        return False
    names = [path.name for path in folder.iterdir()]
    return any(map(is_model_file, names)) and not any(name.endswith("_optim_states.pt") for name in names)


def read_universal(folder: Path) -> Source:
    """Open the folder.

    Raises:
        CheckpointError: it is incomplete, damaged, or not as DeepSpeed writes it.
    """
    with as_written(folder, "DeepSpeed's ds_to_universal"):
        return _Reader(folder).read()


class _Reader:
    """Reads one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.grid = find_grid(folder, whole=True)
        self.states = ModelStates(folder, self.grid, assumed=True)
        self.found = Found(folder)
        self._keys: dict[str, Any] = {}
        self.files = [*self.grid.names, f"{STATES}/{OPTIMIZER_STATE}"]

    def _fail(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.folder}: {reason}")

    def read(self) -> Source:
        states, common = self.states, self.states.common()
        options = load_pickled(self.folder / STATES / OPTIMIZER_STATE)
        states.check_save(options, f"{STATES}/{OPTIMIZER_STATE}")
        self._check_other_level()
        stage3 = options.get("optimizer_state_dict")
        shapes = self._shapes()
        states.experts.check_universal(states.first)
        step = _step_of(stage3)
        names = sorted(entry.name for entry in os.scandir(self.folder / STATES) if entry.is_dir())
        called = {name: states.experts.model_name(name) for name in names}  # by AutoEP, and by the model
        lacking = sorted(set(shapes) - {called[name] for name in names})
        if lacking:
            raise self._fail(f"{STATES}/ has no folder of {lacking[0]} and {len(lacking) - 1} other parameters")
        for name in names:
            if not name.isprintable():
                raise self._fail(f"{name!r} in {STATES}/ cannot be a name")
            known = called[name]
            if states.experts.is_stacked(name):
                states.experts.give(name, self._local(name, None, step, trains=name in shapes))
            elif known is not None and (known in shapes or len(self._written(name)) > 1):
                whole = self._local(name, shapes.get(known), step, trains=True)
                self.found.keys[known] = self._keys
                self.found.add(known, [whole], None, trainable=True)
        states.place_experts(self.found)
        self._options(common, options)
        tied = states.tied()
        if states.tensor > 1 and states.info is None:
            self._check_frozen(names, tied)
        buffers = states.rest(self.found, tied, common["extra_state"])
        stage = _stage(options, self.grid.models[0][0])
        return states.source(CheckpointKind.UNIVERSAL, self.found, stage, buffers, tied, common, self.files)

    def _check_other_level(self) -> None:
        """What ds_hf writes has the model's file twice, as DeepSpeed looks for it at stages 1 and 2, and at stage 3."""
        if SAVE not in self.states.first:
            return
        others = {entry.name for entry in os.scandir(self.folder) if is_model_file(entry.name)} - {*self.grid.names}
        for name in sorted(others):
            self.states.check_save(load_pickled(self.folder / name), name)
            self.files.append(name)

    def _shapes(self) -> dict[str, tuple[int, ...] | None]:
        """Parameters that train; shapes where the model has no slices, so that flat tensors get theirs."""
        found: dict[str, tuple[int, ...] | None] = {}
        for column in range(len(self.grid.models)):
            for flat in self.states.shapes(column) if self.states.content[column][0].get("param_shapes") else ():
                for name, shape in flat.items():
                    found.setdefault(name, shape if self.states.tensor == 1 else None)
        return found

    def _written(self, name: str) -> list[str]:
        """States that there are files of, the step aside."""
        files = (entry.name for entry in os.scandir(self.folder / STATES / name) if entry.is_file())
        return sorted(file.removesuffix(".pt") for file in files if file.endswith(".pt") and file != "step.pt")

    def _local(self, name: str, shape: tuple[int, ...] | None, step: Any, *, trains: bool) -> Local:
        """What lies in the folder of one parameter; ``_keys`` are then what is said beside its value."""
        moments = self._written(name)
        if _VALUE not in moments:
            raise self._fail(f"{STATES}/{name}/{_VALUE}.pt is missing")
        save = self.states.first.get(SAVE)
        value = _File(self.folder, f"{STATES}/{name}/{_VALUE}.pt", save)
        whole = value.shape
        vocabulary = value.keys.get("vocab_tensor") is True
        if shape is not None and whole != shape:
            if math.prod(whole) == math.prod(shape):
                whole = shape  # written flat, or as the view by which it was cut
            elif not vocabulary or whole[1:] != shape[1:] or whole[0] > shape[0]:
                raise self._fail(f"{name} has shape {list(whole)} in {STATES}/ and {list(shape)} in the model")
        numel, states = math.prod(whole), {"master" if trains else "weight": value.file}
        self.found.tensors[value.file, value.file] = value
        scalars: dict[str, Any] = {}
        if (self.folder / STATES / name / "step.pt").is_file():
            step = _number(self.folder / STATES / name / "step.pt")
            if float(step) != value.written.get("step", float(step)):
                raise self._fail(
                    f"{STATES}/{name}/step.pt is of another save than the files beside it: copy them again"
                )
            self.files.append(f"{STATES}/{name}/step.pt")
        for state in moments:
            if state != _VALUE:
                other = _File(self.folder, f"{STATES}/{name}/{state}.pt", save, numel)
                self.found.tensors[value.file, other.file] = other
                states[state] = other.file
                self.files.append(other.file)
        if step is not None:
            self.found.counts_in_tensors |= isinstance(step, Tensor)
            scalars["step"] = encode_scalar(as_step("step", step))
        self.files.append(value.file)
        self._keys = {key: entry for key, entry in value.keys.items() if key != "param"}
        rows = [SavedFragment(value.file, 0, 0, numel)] if numel else []
        return Local(whole, states, rows, scalars)

    def _options(self, common: dict[str, Any], options: dict[str, Any]) -> None:
        groups = base_groups(options) or base_groups(options.get("optimizer_state_dict"))
        if groups is not None:
            common["param_groups"] = options_of(groups)
            self._name_groups(groups)
        scaler = scaler_of(options.get("loss_scaler"))
        if scaler is not None:
            common["loss_scaler"] = scaler

    def _name_groups(self, groups: list[dict[str, Any]]) -> None:
        named: list[dict[str, None]] = [{} for _ in groups]
        for pipe in range(self.states.pipe):
            flats = [
                {known: None for name in flat for known in self.states.experts.in_model(name)}
                for flat in self.states.shapes(self.states.column(pipe, 0))
            ]
            for known, names in zip(named, names_of_groups(groups, flats), strict=True):
                known.update(dict.fromkeys(names))
        self.found.groups = [list(known) for known in named]

    def _check_frozen(self, names: list[str], tied: dict[str, str]) -> None:
        """Without rules slices of frozen parameters cannot be put together."""
        for column, row in enumerate(self.states.content):
            known = {*self.found.parameters, *tied, *(row[0].get("buffer_names") or ())}
            for name in self.states.module(column):
                if name not in known and name in names:
                    raise self._fail(
                        f"{name} does not train, and nothing says how the slices of it that tensor-parallel ranks have "
                        f"make the whole: put a file {RULES_FILE} beside the folder's files"
                    )


def _step_of(state: Any) -> Any:
    """At stage 3 the step is in the common file."""
    known = state.get("state") if isinstance(state, dict) else None
    first = known.get(0) if isinstance(known, dict) else None
    step = first.get("step") if isinstance(first, dict) else None
    return _checked_step(step) if step is not None else None


def _number(path: Path) -> Any:
    value = load_any(path)
    try:
        return _checked_step(value)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None


def _checked_step(value: Any) -> Any:
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < 2**63:
        raise ValueError(f"the step is {str(value)[:80]!r}")
    return value.reshape(()) if isinstance(value, Tensor) else value


def _stage(options: dict[str, Any], model: str) -> int | None:
    known = options.get("zero_stage")
    if isinstance(known, int) and not isinstance(known, bool):
        return int(known)
    return 3 if model.startswith("zero_pp_rank_") else None


class _File:
    """One state of one parameter, loaded when it is wanted, and seen flat.

    Attributes:
        file: its name in the checkpoint's folder.
        written: what ds_hf has noted beside the tensor.
    """

    def __init__(self, folder: Path, file: str, save: Any, numel: int | None = None) -> None:
        self.file, self._path, self._save, self._numel = file, folder / file, save, numel
        self.written: dict[Any, Any] = {}
        self._loaded: tuple[Tensor, dict[str, Any]] | None = None
        self._summed = False

    def _load(self) -> tuple[Tensor, dict[str, Any]]:
        if self._loaded is None:
            content = load_any(self._path, sums=False)
            keys = content if isinstance(content, dict) else {}
            value = content.get("param") if isinstance(content, dict) else content
            if not isinstance(value, Tensor) or not value.is_floating_point() or value.layout is not torch.strided:
                raise CheckpointError(f"{self._path} holds no tensor of floating-point numbers")
            if self._numel is not None and value.numel() != self._numel:
                raise CheckpointError(f"{self._path} has {value.numel()} elements, and the parameter has {self._numel}")
            written = keys.get(WRITTEN_AS)
            self.written = written if isinstance(written, dict) else {"as": written}  # earlier versions: where alone
            self._check_place()
            self._loaded = value.detach(), {str(key): entry for key, entry in keys.items() if key != WRITTEN_AS}
        return self._loaded

    def _check_place(self) -> None:
        """Files of two parameters of one shape, of two states or saves may have been exchanged; DeepSpeed's do not
        tell."""
        here, written_as = self.file.removeprefix(f"{STATES}/").removesuffix(".pt"), self.written.get("as")
        if self.written.get(SAVE, self._save) != self._save:
            raise CheckpointError(f"{self._path} is of another save than the folder: copy the folder again")
        if isinstance(written_as, str) and written_as != here:
            raise CheckpointError(
                f"{self._path} was written as {written_as}.pt: files are in each other's place, so copy them again"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._load()[0].shape)

    @property
    def keys(self) -> dict[str, Any]:
        """What is said beside the tensor."""
        return self._load()[1]

    def get_shape(self) -> list[int]:
        return [self._load()[0].numel()]

    def __getitem__(self, place: slice) -> Tensor:
        if place.start != place.stop and not self._summed and is_summed(self._path):
            check_pickled(self._path)
            self._summed = True
        return self._load()[0].reshape(-1)[place]
