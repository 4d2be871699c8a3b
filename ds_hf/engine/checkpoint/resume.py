"""What a checkpoint holds besides weights, looked at before anything of the engine is changed.

A stranger's manifest or pickled file may have anything where a number or a list should be; what is wrong is named here,
with its file, and not met halfway through a load.

Tied names are the same parameter: a name that only one side has is no difference if its tied partner is there.
"""

from __future__ import annotations

import os
import re
import reprlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ds_hf.checkpoint.format import MANIFEST, SavedBuffer, SavedParameter
from ds_hf.checkpoint.manifest import Manifest
from ds_hf.checkpoint.source import CheckpointKind, Source
from ds_hf.checkpoint.trust.pickled import read_pickled
from ds_hf.engine.checkpoint.agreement import collect
from ds_hf.engine.checkpoint.describe import formats_by_name, mesh_sizes
from ds_hf.engine.checkpoint.holders import Holders
from ds_hf.engine.checkpoint.live import (
    Checkpointable,
    aliases,
    flat_buffers,
    loose_parameters,
    module_buffers,
    names_of,
    world_of,
)
from ds_hf.engine.comm.mesh import Axis
from ds_hf.engine.zero.cut import whole_shape
from ds_hf.errors import CheckpointError
from ds_hf.log import logger, warn_once

__all__ = [
    "Fit",
    "RankStates",
    "check_common",
    "check_extra",
    "check_fit",
    "check_tied",
    "identity_of",
    "model_shapes",
    "naming",
    "rank_states",
    "same_for_all",
    "same_mesh",
]

_RANK_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d{1,9})_mp_rank_\d+_optim_states\.pt")
_SCALARS = (type(None), bool, int, float, str)


@dataclass(frozen=True)
class RankStates:
    """What ranks keep for themselves.

    Attributes:
        own: this rank's of the same mesh, else ``None``.
        irregular: entries of all ranks, if there are any.
    """

    own: dict[str, Any] | None
    irregular: list[dict[str, Any]]


def check_extra(manifest: Manifest) -> None:
    """Raise ``CheckpointError`` unless the parts of the manifest that are not about tensors have their types."""
    extra, path = manifest.extra, manifest.folder / MANIFEST
    _require(path, "counters", extra.get("counters", {}), lambda v: _is_dict_of(v, _is_count))
    _require(path, "scalings", extra.get("scalings", {}), lambda v: _is_dict_of(v, lambda each: type(each) is float))
    _require(path, "frozen", extra.get("frozen", {}), lambda v: _is_dict_of(v, _are_numbers))
    _require(path, "optimizer", extra.get("optimizer"), lambda v: v is None or isinstance(v, dict))
    _require(
        path, "groups", extra.get("groups"), lambda v: v is None or (isinstance(v, list) and all(map(_is_names, v)))
    )
    _require(path, "irregular", extra.get("irregular"), lambda v: v is None or _are_stretches(v))
    for parameter in manifest.parameters.values():
        _require(path, f"scalars of {parameter.name}", parameter.scalars, lambda v: _is_dict_of(v, _is_scalar))
        if "step" in parameter.scalars:
            _require(path, f"step of {parameter.name}", parameter.scalars["step"], _is_step)


def check_common(source: Source) -> None:
    """Raise ``CheckpointError`` unless what is one for all ranks has the types that it was saved with."""
    common, folder = source.common, source.folder
    for key in ("client_state", "extra_state"):
        _require(folder, key, common.get(key), lambda v: isinstance(v, dict))
    _require(folder, "features", common.get("features", {}), lambda v: _is_dict_of(v, _is_dict))
    for key in ("lr_scheduler", "loss_scaler", "data"):
        _require(folder, key, common.get(key), lambda v: v is None or isinstance(v, dict))
    scaler = common.get("loss_scaler")
    if scaler is not None:
        _require(folder, "loss_scaler", scaler, lambda v: isinstance(v.get("state"), dict))


def same_mesh(engine: Checkpointable, manifest: Manifest) -> bool:
    """Whether as many processes wrote the checkpoint, divided in the same way: then each has its own part of it."""
    live = {"world_size": world_of(engine).world_size, **mesh_sizes(engine)}
    return live == {"world_size": manifest.world_size, **({"mesh": m} if (m := manifest.extra.get("mesh")) else {})}


def rank_states(engine: Checkpointable, source: Source) -> RankStates:
    """Read the pickled states that this rank needs; other libraries have none."""
    manifest, rank = source.manifest, world_of(engine).rank
    if source.kind is not CheckpointKind.DS_HF:
        return RankStates(None, [])
    matches = [_RANK_FILE.fullmatch(name) for name in manifest.files]
    by_rank = {int(match[1]): manifest.folder / match[0] for match in matches if match is not None}
    own, irregular = None, []
    if same_mesh(engine, manifest) and rank in by_rank:
        own = _rank_state(by_rank[rank])
    if manifest.extra.get("irregular") or manifest.extra.get("packs"):
        for other, path in by_rank.items():
            irregular += own["irregular"] if own is not None and other == rank else _rank_state(path)["irregular"]
    return RankStates(own, irregular)


def _is_packed(value: Any) -> bool:
    if not isinstance(value, dict) or not {"class", "inner", "context"} <= value.keys():
        return False
    return _is_dict_of(value["inner"], lambda each: isinstance(each, torch.Tensor))


def _is_object(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("attributes"), dict) and "class" in value


def _rank_state(path: Path) -> dict[str, Any]:
    state = read_pickled(path)
    _require(path, "irregular", state.setdefault("irregular", []), lambda v: isinstance(v, list))
    for entry in state["irregular"]:
        _require(
            path, "irregular", entry, lambda v: isinstance(v, dict) and _is_dict_of(v.get("state"), lambda _: True)
        )
        _require(path, "packed", entry.get("packed", {}), lambda v: _is_dict_of(v, _is_packed))
        _require(path, "objects", entry.get("objects", {}), lambda v: _is_dict_of(v, _is_object))
        _require(path, "irregular", entry.get("where"), lambda v: _are_stretches([[0, *v]]) if _is_row(v) else False)
    if "param_groups" in state:
        _require(path, "param_groups", state["param_groups"], lambda v: isinstance(v, list) and all(map(_is_dict, v)))
    return state


# -- one checkpoint, for all ranks and to the end -------------------------------------------------------------------


def identity_of(folder: Path) -> tuple[int, int, int] | None:
    """What changes when another run replaces the checkpoint while it is read."""
    try:
        status = os.stat(folder / MANIFEST)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def same_for_all(axis: Axis, manifest: Manifest) -> None:
    """Raise ``CheckpointError`` if ranks have read different manifests. Collective."""
    mine = [manifest.extra.get(key) for key in ("checksum", "written_at", "counters")]
    if any(other != mine for other in collect(axis, mine)):
        raise CheckpointError(
            f"{manifest.folder} was replaced while it was read, or ranks see different folders there: load it again, "
            "and let no other run save into it"
        )


@contextmanager
def naming(folder: Path) -> Iterator[None]:
    """Failures inside the block say which checkpoint they are about."""
    try:
        yield
    except CheckpointError as error:
        if str(folder) in str(error):
            raise
        raise CheckpointError(f"{folder}: {error}") from error


# -- types ----------------------------------------------------------------------------------------------------------


def _require(path: Path, what: str, value: Any, is_right: Callable[[Any], bool]) -> None:
    if not is_right(value):
        found = f"a {type(value).__name__}: {reprlib.repr(value)}"
        raise CheckpointError(f"{path if path.exists() else path.parent}: {what} is not what was saved, but {found}")


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(key, str) for key in value)


def _is_dict_of(value: Any, is_right: Callable[[Any], bool]) -> bool:
    return _is_dict(value) and all(map(is_right, value.values()))


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) in (int, float) for each in value)


def _is_row(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _are_stretches(value: Any) -> bool:
    """``[rank, name, start, numel]`` each, with the dim and the ranges of a slice after them."""
    return isinstance(value, list) and all(
        _is_row(row)
        and len(row) in (4, 6)
        and isinstance(row[1], str)
        and all(_is_count(number) for number in (row[0], *row[2:5]))
        and (len(row) == 4 or _are_ranges(row[5]))
        for row in value
    )


def _are_ranges(value: Any) -> bool:
    return _is_row(value) and all(_is_row(pair) and len(pair) == 2 and all(map(_is_count, pair)) for pair in value)


def _is_scalar(value: Any) -> bool:
    """A number or text, or ``[dtype, number]``."""
    if isinstance(value, list):
        return len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], bool | int | float)
    return isinstance(value, _SCALARS)


def _is_step(value: Any) -> bool:
    """What an optimizer counts: a number, or ``[dtype, number]``."""
    number = value[1] if isinstance(value, list) else value
    return isinstance(number, int | float) and not isinstance(number, bool) and 0 <= number < 2**63


# -- names and shapes --------------------------------------------------------------------------------------------------


_LISTED = 10  # names in a message


@dataclass(frozen=True)
class Fit:
    """What the checkpoint has for the model's names; a name that is missing keeps its present value."""

    parameters: dict[str, SavedParameter]
    buffers: dict[str, SavedBuffer]


def check_fit(
    engine: Checkpointable, holders: Holders, manifest: Manifest, *, strict: bool, lenient_names: bool = False
) -> Fit:
    """Match names and compare shapes.

    Args:
        strict: names that only one side has are an error; otherwise a warning.
        lenient_names: neither names nor shapes are compared, because a function of the user places the weights.

    Raises:
        CheckpointError: it lists every name and shape that does not fit.
    """
    shapes, frozen = model_shapes(engine)
    rows = _rows_of_bytes(engine)
    buffers, tied_buffers = module_buffers(engine.module)
    buffers = {name: value for name, value in buffers.items() if name not in holders.own}
    further = {**aliases(engine), **tied_buffers}
    partners: dict[str, list[str]] = {}
    for alias, name in further.items():
        partners.setdefault(name, []).append(alias)

    def find(name: str) -> str | None:
        """The checkpoint's first name of the model's ``name``."""
        for candidate in (name, *partners.get(name, ())):
            place: str = manifest.tied.get(candidate, candidate)
            if place in manifest.parameters or place in manifest.buffers:
                return place
        return None

    places = {name: find(name) for name in (*shapes, *buffers)}
    fit = Fit(
        {name: manifest.parameters[place] for name, place in places.items() if place in manifest.parameters},
        {name: manifest.buffers[place] for name, place in places.items() if place in manifest.buffers},
    )
    if lenient_names:
        return fit
    for name in shapes.keys() & fit.parameters.keys():
        if fit.parameters[name].shape == rows.get(name) and fit.parameters[name].dtype == "uint8":
            shapes[name] = rows[name]
    _check_shapes(manifest, shapes, {name: tuple(b.shape) for name, b in buffers.items()}, fit)
    _check_blocks(engine, manifest, fit)
    left_out = manifest.excluded & {*frozen, *buffers}
    missing = [n for n, place in places.items() if place is None and n not in left_out]
    known = {*places, *further, *holders.own}
    used = {place for place in places.values() if place is not None}
    for name in holders.names:  # what only other processes have
        known.add(name)
        used.add(manifest.tied.get(name, name))
    saved = [*manifest.parameters, *manifest.buffers]
    unexpected = [n for n in saved if n not in known and n not in used]
    _report(manifest, missing, unexpected, strict, holders.rank)
    return fit


def check_tied(engine: Checkpointable, source: Source, *, strict: bool) -> None:
    """Names of one parameter here have one value there, too: of two, one would go unnoticed, as in torch.

    Raises:
        CheckpointError: they do not, and ``strict`` asks for all; otherwise a warning.
    """
    saved, tied = source.manifest.parameters, source.manifest.tied
    for alias, name in aliases(engine).items():
        pair = [saved.get(tied.get(each, each)) for each in (name, alias)]
        first, second = pair
        if first is None or second is None or first is second or first.shape != second.shape:
            continue
        values = [source.state(each, each.value_state) for each in (first, second)]
        if torch.equal(values[0].float(), values[1].float()):
            continue
        told = (
            f"{source.folder} does not fit the model: {name} and {alias} are one parameter in it, and two with values "
            "of their own in the checkpoint"
        )
        if strict:
            raise CheckpointError(f"{told}. Build the model as it was (a head: tie_word_embeddings=False)")
        warn_once(f"{told}: those of {first.name} are loaded")


def _rows_of_bytes(engine: Checkpointable) -> dict[str, tuple[int, ...]]:
    """The form in which older versions saved integers and complex values, where parameters were sharded: bytes."""
    rows: dict[str, tuple[int, ...]] = {name: (loose.nbytes,) for name, loose in loose_parameters(engine).items()}
    for buffer in flat_buffers(engine):
        if buffer.dtype is torch.uint8:
            shapes = (tuple(slot.shape) for slot in buffer.layout.slots)
            rows.update(zip(names_of(engine, buffer), shapes, strict=True))
    return rows


def _check_blocks(engine: Checkpointable, manifest: Manifest, fit: Fit) -> None:
    """Bytes of another format may have the same shape."""
    saved, live = manifest.extra.get("blocks"), formats_by_name(engine)
    if not isinstance(saved, dict):
        return
    for name, parameter in fit.parameters.items():
        before, now = saved.get(parameter.name), live.get(name)
        if before != now:
            said = [
                dict(zip(_FORM, each, strict=False)) if isinstance(each, list) else "none" for each in (before, now)
            ]
            raise CheckpointError(
                f"{manifest.folder} does not fit the model: {name} was saved in blocks of {said[0]}, and here it is in "
                f"blocks of {said[1]}: give the same weight_quantization"
            )


_FORM = ("num_bits", "group_size", "symmetric", "group_dim")


def model_shapes(engine: Checkpointable) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    """Whole shapes of all parameters, and the names of those that nothing updates."""
    shapes: dict[str, tuple[int, ...]] = {}
    frozen: set[str] = set()
    for buffer in flat_buffers(engine):
        for name, slot, param in zip(names_of(engine, buffer), buffer.layout.slots, buffer.params, strict=True):
            shapes[name] = tuple(whole_shape(param, buffer.form_of(slot)[1]))
            if buffer.frozen:
                frozen.add(name)
    for name, loose in loose_parameters(engine).items():
        shapes[name] = tuple(whole_shape(loose, loose.shape))
        frozen.add(name)
    return shapes, frozen


def _check_shapes(
    manifest: Manifest, shapes: dict[str, tuple[int, ...]], buffers: dict[str, tuple[int, ...]], fit: Fit
) -> None:
    saved = {n: p.shape for n, p in fit.parameters.items()} | {n: b.shape for n, b in fit.buffers.items()}
    wrong = [
        f"{name}: {list(shape)} in the model, {list(saved[name])} in the checkpoint"
        for name, shape in {**shapes, **buffers}.items()
        if name in saved and saved[name] != shape
    ]
    if wrong:
        raise CheckpointError(
            f"{manifest.folder} does not fit the model; shapes differ: {_listed(wrong, '; ')}. Build the model with "
            "the checkpoint's sizes (a vocabulary: resize_token_embeddings() before initialize()), or place the "
            "weights yourself with custom_load_fn"
        )


def _report(manifest: Manifest, missing: list[str], unexpected: list[str], strict: bool, rank: int) -> None:
    parts = []
    if missing:
        parts.append(f"missing in the checkpoint: {_listed(missing)}")
    if unexpected:
        parts.append(f"not in the model: {_listed(unexpected)}")
    if parts and strict:
        raise CheckpointError(
            f"{manifest.folder} does not fit the model; {'; '.join(parts)} (load_module_strict=False loads the rest)"
        )
    if missing and manifest.parameters and manifest.parameters.keys() <= set(unexpected):
        # The Trainer asks for no strictness where there are adapters, and would go on with a step count and no weights.
        raise CheckpointError(
            f"{manifest.folder} is of another model, of which nothing is in this one; {'; '.join(parts)}. A run with "
            "adapters does not go on from one without, nor the other way: write the weights for from_pretrained() "
            "(ds-hf checkpoint convert --to hf, or merge_and_unload() of adapters) and begin a new run with them"
        )
    if parts and rank == 0:
        logger.warning("%s: %s", manifest.folder, "; ".join(parts))


def _listed(names: list[str], separator: str = ", ") -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return separator.join(names[:_LISTED]) + more
