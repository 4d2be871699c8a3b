"""Writing the manifest: what rank 0 knows of the layout, and what every rank reports of its part.

Every rank writes the same thing at every stage, its shard of each flat buffer, so replicated states are stored once
and the format does not depend on the stage. ``zero_to_fp32`` reads what is made here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

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

__all__ = ["RankReport", "buffer_key", "build_manifest", "counters", "flat_key", "loose_key"]


@dataclass
class RankReport:
    """What one rank has written.

    Attributes:
        files: size of each file in bytes.
        states: for each parameter, the optimizer's moments, without its master.
        scalars: for each parameter, the optimizer's scalars, encoded.
        groups: parameter group of each parameter of which the rank updates a part.
        irregular: ``[name, start, numel]`` of states that lie in the rank's pickled file.
    """

    files: dict[str, int] = field(default_factory=dict)
    states: dict[str, list[str]] = field(default_factory=dict)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: dict[str, int] = field(default_factory=dict)
    irregular: list[tuple[str, int, int]] = field(default_factory=list)


def flat_key(index: int, state: str) -> str:
    """Tensor key of a state of the flat buffer ``index``."""
    return f"flat.{index:05d}.{state}"


def loose_key(name: str) -> str:
    """Tensor key of a parameter that lives in no unit."""
    return f"parameter.{name}"


def buffer_key(name: str) -> str:
    """Tensor key of a module's buffer."""
    return f"buffer.{name}"


def build_manifest(
    engine: Checkpointable, tag: str, reports: Sequence[RankReport], common_file: str, exclude_frozen: bool
) -> dict[str, Any]:
    """The manifest of a checkpoint whose ranks reported ``reports``."""
    parameters: dict[str, Any] = {}
    excluded: list[str] = []
    for index, buffer in enumerate(flat_buffers(engine)):
        if is_left_out(buffer.params, exclude_frozen):
            excluded += names_of(engine, buffer)
        else:
            parameters.update(_flat_entries(engine, index, buffer, reports))
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
        "files": {name: nbytes for report in reports for name, nbytes in report.files.items()},
        "optimizer": _optimizer(engine),
        "groups": _groups(engine, reports),
        "irregular": [[rank, *entry] for rank, report in enumerate(reports) for entry in report.irregular],
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


def counters(engine: Checkpointable) -> dict[str, int]:
    """How far training has come."""
    return {
        "global_steps": engine.global_steps,
        "global_samples": engine.global_samples,
        "skipped_steps": engine.skipped_steps,
        "micro_steps": engine.micro_steps,
    }


def _flat_entries(
    engine: Checkpointable, index: int, buffer: FlatBuffer, reports: Sequence[RankReport]
) -> dict[str, dict[str, Any]]:
    names = names_of(engine, buffer)
    has_master = engine.optimizer is not None and engine.optimizer.master(buffer) is not None
    value = "master" if has_master else "weight"
    entries: dict[str, dict[str, Any]] = {}
    for name, slot, param in zip(names, buffer.layout.slots, buffer.params, strict=True):
        moments = list(dict.fromkeys(state for report in reports for state in report.states.get(name, ())))
        entries[name] = {
            "shape": list(slot.shape),
            "dtype": dtype_name(buffer.dtype),
            "trainable": param.requires_grad,
            "states": {state: flat_key(index, state) for state in (value, *moments)},
            "fragments": [],
        }
        scalars = {key: v for report in reports for key, v in report.scalars.get(name, {}).items()}
        if scalars:
            entries[name]["scalars"] = scalars
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


def _groups(engine: Checkpointable, reports: Sequence[RankReport]) -> list[list[str]] | None:
    """Names of the parameters of each parameter group, ``None`` without an optimizer."""
    if engine.optimizer is None:
        return None
    groups: list[dict[str, None]] = [{} for _ in engine.optimizer.param_groups]
    for report in reports:
        for name, group in report.groups.items():
            groups[group].setdefault(name)
    return [list(names) for names in groups]


def _version() -> str:
    try:
        return version("ds-hf")
    except PackageNotFoundError:
        return "unknown"
