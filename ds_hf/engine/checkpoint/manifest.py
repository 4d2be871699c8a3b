"""Writing the manifest: what rank 0 knows of the layout, and what every rank reports of its part.

``describe`` looks at the engine, at the moment that is saved; ``complete`` adds the reports, perhaps much later.

Every rank writes the same thing at every stage, its shard of each flat buffer, so replicated states are stored once
and the format does not depend on the stage. ``zero_to_fp32`` reads what is made here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from ds_hf.engine.checkpoint.checksum import add, hexadecimal
from ds_hf.engine.checkpoint.files import tensors_name
from ds_hf.engine.checkpoint.interface import (
    Checkpointable,
    aliases,
    dtype_name,
    flat_buffers,
    is_left_out,
    loose_parameters,
    module_buffers,
    names_of,
)
from ds_hf.engine.checkpoint.zero_to_fp32 import FORMAT, VERSION
from ds_hf.engine.zero.buffer import FlatBuffer

__all__ = ["RankReport", "buffer_key", "complete", "counters", "describe", "flat_key", "loose_key"]

Json = dict[str, Any]


@dataclass
class RankReport:
    """What one rank has written.

    Attributes:
        files: size of each file in bytes.
        states: for each parameter, the optimizer's moments, without its master.
        scalars: for each parameter, the optimizer's scalars, encoded.
        groups: parameter group of each parameter of which the rank updates a part.
        irregular: ``[name, start, numel]`` of states that lie in the rank's pickled file.
        rng: digests of the rank's random states.
        options: of each parameter group as this rank has it, the digests of its options.
        common: rank 0's digests of what is one for all.
        checksums: of each file.
        sums: for each state of each parameter, the sum of the rank's part, see ``checksum``.
    """

    files: dict[str, int] = field(default_factory=dict)
    states: dict[str, list[str]] = field(default_factory=dict)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: dict[str, int] = field(default_factory=dict)
    irregular: list[tuple[str, int, int]] = field(default_factory=list)
    rng: dict[str, str] = field(default_factory=dict)
    options: list[dict[str, str]] = field(default_factory=list)
    common: dict[str, Any] = field(default_factory=dict)
    checksums: dict[str, str] = field(default_factory=dict)
    sums: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)


def flat_key(index: int, state: str) -> str:
    """Tensor key of a state of the flat buffer ``index``."""
    return f"flat.{index:05d}.{state}"


def loose_key(name: str) -> str:
    """Tensor key of a parameter that lives in no unit."""
    return f"parameter.{name}"


def buffer_key(name: str) -> str:
    """Tensor key of a module's buffer."""
    return f"buffer.{name}"


def describe(engine: Checkpointable, tag: str, common_file: str, exclude_frozen: bool) -> Json:
    """What the engine alone tells of a checkpoint that is taken of it now."""
    parameters: Json = {}
    excluded: list[str] = []
    for index, buffer in enumerate(flat_buffers(engine)):
        if is_left_out(buffer.params, exclude_frozen):
            excluded += names_of(engine, buffer)
        else:
            parameters.update(_flat_entries(engine, index, buffer))
    for name, param in loose_parameters(engine).items():
        if is_left_out([param], exclude_frozen):
            excluded.append(name)
            continue
        parameters[name] = {
            "shape": list(param.shape),
            "dtype": dtype_name(param.dtype),
            "trainable": param.requires_grad,
            "states": {"weight": loose_key(name)},
            "fragments": [[tensors_name(0), 0, 0, param.numel()]] if param.numel() else [],
        }
    buffers, tied_buffers = module_buffers(engine.module)
    return {
        "format": FORMAT,
        "version": VERSION,
        "written_by": {"ds_hf": _version(), "torch": torch.__version__},
        "tag": tag,
        "world_size": engine.axis.world_size,
        "counters": counters(engine),
        "common_file": common_file,
        "optimizer": _optimizer(engine),
        "groups": _given_groups(engine),
        "parameters": parameters,
        "excluded": excluded,
        "tied": {**aliases(engine), **tied_buffers},
        "buffers": {
            name: {
                "shape": list(value.shape),
                "dtype": dtype_name(value.dtype),
                "file": tensors_name(0),
                "key": buffer_key(name),
            }
            for name, value in buffers.items()
        },
    }


def complete(description: Json, reports: Sequence[RankReport]) -> Json:
    """The manifest of a checkpoint whose ranks wrote what ``reports`` say; ``description`` is used up."""
    for name, entry in description["parameters"].items():
        index = entry.pop("index", None)
        for report in reports:
            for state in report.states.get(name, ()):
                entry["states"].setdefault(state, flat_key(index, state))
            if report.scalars.get(name):
                entry.setdefault("scalars", {}).update(report.scalars[name])
    if description["groups"] is not None:
        description["groups"] = _groups(description["groups"], reports)
    return {
        **description,
        "written_at": time.time(),
        "files": {name: nbytes for report in reports for name, nbytes in report.files.items()},
        "checksums": {name: text for report in reports for name, text in report.checksums.items()},
        "irregular": [[rank, *entry] for rank, report in enumerate(reports) for entry in report.irregular],
        "digest": {
            "tensors": _digests(reports),
            "rng": [report.rng for report in reports],
            "groups": [report.options for report in reports],
            **reports[0].common,
        },
    }


def _digests(reports: Sequence[RankReport]) -> dict[str, dict[str, str]]:
    """For each state of each parameter the sum of all ranks' parts, which does not depend on how it was cut."""
    total: dict[str, dict[str, tuple[int, int]]] = {}
    for report in reports:
        for name, states in report.sums.items():
            found = total.setdefault(name, {})
            for state, (first, second) in states.items():
                found[state] = add(found.get(state, (0, 0)), (first, second))
    return {name: {state: hexadecimal(value) for state, value in states.items()} for name, states in total.items()}


def counters(engine: Checkpointable) -> dict[str, int]:
    """How far training has come."""
    return {
        "global_steps": engine.global_steps,
        "global_samples": engine.global_samples,
        "skipped_steps": engine.skipped_steps,
        "micro_steps": engine.micro_steps,
    }


def _flat_entries(engine: Checkpointable, index: int, buffer: FlatBuffer) -> dict[str, Json]:
    names = names_of(engine, buffer)
    has_master = engine.optimizer is not None and engine.optimizer.updates(buffer)
    value = "master" if has_master else "weight"
    entries: dict[str, Json] = {}
    for name, slot, param in zip(names, buffer.layout.slots, buffer.params, strict=True):
        entries[name] = {
            "shape": list(slot.shape),
            "dtype": dtype_name(buffer.dtype),
            "trainable": param.requires_grad,
            "states": {value: flat_key(index, value)},
            "fragments": [],
            "index": index,
        }
    for rank in range(buffer.axis.world_size):
        for fragment in buffer.layout.fragments(rank):
            row = [tensors_name(rank), fragment.start, fragment.shard_start, fragment.numel]
            entries[names[fragment.slot.index]]["fragments"].append(row)
    return entries


def _optimizer(engine: Checkpointable) -> dict[str, Any] | None:
    """Class of the optimizer, and whether it saw parameters whole or in the pieces that the fragments are."""
    if engine.optimizer is None:
        return None
    return {"class": type(engine.optimizer.optimizer).__name__, "whole": engine.optimizer.whole}


def _given_groups(engine: Checkpointable) -> list[list[str]] | None:
    """Names of each parameter group in the user's order, by which DeepSpeed knows parameters; ``None`` without one."""
    if engine.optimizer is None:
        return None
    return [[engine.param_names.get(id(param), "") for param in group] for group in engine.optimizer.given]


def _groups(given: list[list[str]], reports: Sequence[RankReport]) -> list[list[str]]:
    """Names of the parameters of each parameter group that are in the checkpoint."""
    groups: list[dict[str, None]] = [{} for _ in given]
    for report in reports:
        for name, group in report.groups.items():
            groups[group].setdefault(name)
    places = [{name: place for place, name in enumerate(names)} for names in given]
    return [
        sorted(names, key=lambda name, known=known: known.get(name, len(known)))  # type: ignore[misc]
        for names, known in zip(groups, places, strict=True)
    ]


def _version() -> str:
    try:
        return version("ds-hf")
    except PackageNotFoundError:
        return "unknown"
