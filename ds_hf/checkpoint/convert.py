"""Writing an opened checkpoint as one of ours: one rank's files, which any world size and stage loads.

Random state and what only fits one rank's piece are not carried over. Invariant: the folder appears whole under its
name or not at all, and ``latest`` names it last.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_hf.checkpoint.checksum import checksum_of_file
from ds_hf.checkpoint.commit import announce, checked_tag, publish, stage
from ds_hf.checkpoint.files import (
    check_loadable,
    model_states_name,
    optimizer_states_name,
    tensors_name,
    write_pickled,
    write_text,
)
from ds_hf.checkpoint.format import FORMAT, MANIFEST, SCRIPT, VERSION, SavedParameter
from ds_hf.checkpoint.manifest import sealed
from ds_hf.checkpoint.places import folder_of
from ds_hf.checkpoint.pretrained import ShardedWriter, Spec
from ds_hf.checkpoint.source import Report, Source, Weight
from ds_hf.checkpoint.standalone import standalone_script
from ds_hf.dtypes import name_of
from ds_hf.log import logger

__all__ = ["default_tag", "state_bytes", "target_of", "write_own"]


def default_tag(source: Source) -> str:
    """``global_step`` and the number of steps, which transformers looks for."""
    counters = source.manifest.extra.get("counters") or {}
    return f"global_step{int(counters.get('global_steps', 0))}"


def target_of(source: Source, save_dir: str | Path, tag: str | None) -> tuple[Path, Path]:
    """``save_dir`` and the folder inside it that is going to be written.

    Raises:
        CheckpointPlaceError: one of them cannot be one.
    """
    root = folder_of(save_dir, "the output folder")
    return root, root / checked_tag(default_tag(source) if tag is None else tag)


def write_own(
    source: Source, save_dir: str | Path, tag: str | None = None, report: Report | None = None, *, over: bool = False
) -> Path:
    """Write ``save_dir/tag`` and let ``latest`` name it; returns the folder.

    Args:
        over: replace a checkpoint that is there.

    Raises:
        CheckpointError: the source is damaged, or the tag exists.
    """
    source.check()
    root, target = target_of(source, save_dir, tag)
    with stage(target, state_bytes(source), over=over) as staged:
        common = {key: value for key, value in source.common.items() if key not in _identity(source)}
        check_loadable(common, str(source.folder))
        files = {tensors_name(0): _write_tensors(source, staged, report)}
        bf16 = any(weight.dtype is torch.bfloat16 for weight in source.weights())
        files[optimizer_states_name(0, bf16=bf16)] = write_pickled(
            staged / optimizer_states_name(0, bf16=bf16), _owned({**_identity(source), "rng": {}, "irregular": []})
        )
        name = model_states_name(0, sharded=False)
        files[name] = write_pickled(staged / name, _owned({**_identity(source), **common}))
        write_text(staged / SCRIPT, standalone_script(), 0o755)
        manifest = _manifest(source, target.name, name, files)
        manifest["checksums"] = {file: checksum_of_file(staged / file) for file in files}
        write_text(staged / MANIFEST, sealed(manifest))
        publish(staged, target, over=over)
    announce(root, str(target.relative_to(root)), save_latest=True)
    _warn_of_losses(source)
    return target


def state_bytes(source: Source) -> int:
    """Bytes of all states and buffers."""
    states = (
        saved.numel * source.stored_dtype(saved, state).itemsize
        for saved in source.manifest.parameters.values()
        for state in saved.states
    )
    return sum(states) + sum(source.files.buffer(buffer).nbytes for buffer in source.manifest.buffers.values())


def _identity(source: Source) -> dict[str, Any]:
    return {"rank": 0, "dp_world_size": 1, "mp_world_size": 1, **_counters(source)}


def _counters(source: Source) -> dict[str, int]:
    known = source.manifest.extra.get("counters") or {}
    names = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
    return {name: int(known.get(name, 0)) for name in names}


def _key(name: str, state: str) -> str:
    return f"parameter.{name}.{state}"


def _write_tensors(source: Source, folder: Path, report: Report | None) -> int:
    manifest = source.manifest
    specs = [
        Spec(_key(name, state), (saved.numel,), source.stored_dtype(saved, state))
        for name, saved in manifest.parameters.items()
        for state in saved.states
    ]
    buffers = {name: source.files.buffer(buffer).dtype for name, buffer in manifest.buffers.items()}
    specs += [Spec(f"buffer.{name}", manifest.buffers[name].shape, dtype) for name, dtype in buffers.items()]
    with ShardedWriter(folder, specs, single=tensors_name(0), report=report) as writer:
        for name, saved in manifest.parameters.items():
            for state in saved.states:
                writer.put(_key(name, state), source.state(saved, state))
        for name, buffer in manifest.buffers.items():
            writer.put(f"buffer.{name}", source.files.buffer(buffer))
    return (folder / tensors_name(0)).stat().st_size


def _owned(content: Any) -> Any:
    """Tensors that do not drag along the file they were read from."""
    if isinstance(content, Tensor):
        return content.detach().clone()
    if type(content) is dict:
        return {key: _owned(value) for key, value in content.items()}
    if type(content) in (list, tuple):
        return type(content)(_owned(value) for value in content)
    return content


def _manifest(source: Source, tag: str, common_file: str, files: dict[str, int]) -> dict[str, Any]:
    known = source.manifest
    weights = {weight.name: weight for weight in source.weights()}
    return {
        "format": FORMAT,
        "version": VERSION,
        "written_by": {"converted_from": source.kind.value, **(known.extra.get("written_by") or {})},
        "tag": tag,
        "world_size": 1,
        "counters": _counters(source),
        "written_at": time.time(),
        "common_file": common_file,
        "files": files,
        "optimizer": known.extra.get("optimizer"),
        "groups": known.extra.get("groups"),
        "irregular": [],
        "parameters": {name: _entry(saved, weights[name]) for name, saved in known.parameters.items()},
        "excluded": sorted(known.excluded),
        "tied": known.tied,
        **known.of_weights,
        "buffers": {
            name: {
                "shape": list(buffer.shape),
                "dtype": name_of(weights[name].dtype),
                "file": tensors_name(0),
                "key": f"buffer.{name}",
            }
            for name, buffer in known.buffers.items()
        },
    }


def _entry(saved: SavedParameter, weight: Weight) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "shape": list(saved.shape),
        "dtype": name_of(weight.dtype),
        "trainable": saved.trainable,
        "states": {state: _key(saved.name, state) for state in saved.states},
        "fragments": [[tensors_name(0), 0, 0, saved.numel]] if saved.numel else [],
    }
    return {**entry, "scalars": saved.scalars} if saved.scalars else entry


def _warn_of_losses(source: Source) -> None:
    if source.manifest.extra.get("irregular"):
        logger.warning(
            "%s: optimizer states that only fit the pieces of its ranks were left out; load with "
            "load_optimizer_states=False, or go on from the original", source.folder,
        )  # fmt: skip
