"""Saving a checkpoint: all of it or nothing.

Order: agree on the tag -> every rank writes its files into a hidden folder beside the target -> rank 0 writes the
manifest and renames the folder -> ``latest`` names it. Until the rename nothing that was there before is touched, and
a failure on any rank is raised on every rank.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
import uuid
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from ds_hf.engine.checkpoint import zero_to_fp32
from ds_hf.engine.checkpoint.agreement import collect, share, together
from ds_hf.engine.checkpoint.consolidate import consolidated_state_dict, save_16bit_model
from ds_hf.engine.checkpoint.files import (
    TensorEntry,
    check_loadable,
    drop_unloadable,
    model_states_name,
    optimizer_states_name,
    replace_text,
    sync_folder,
    tensors_name,
    write_pickled,
    write_tensors,
    write_text,
)
from ds_hf.engine.checkpoint.interface import (
    Checkpointable,
    extra_states,
    flat_buffers,
    is_left_out,
    loose_parameters,
    module_buffers,
)
from ds_hf.engine.checkpoint.manifest import RankReport, buffer_key, build_manifest, counters, flat_key, loose_key
from ds_hf.engine.checkpoint.states import encode_scalar, kinds, pieces, segments_of
from ds_hf.engine.zero.buffer import FlatBuffer
from ds_hf.errors import CheckpointError
from ds_hf.log import logger, warn_once

__all__ = ["consolidated_state_dict", "save_16bit_model", "save_checkpoint"]

SCRIPT = "zero_to_fp32.py"


def save_checkpoint(
    engine: Checkpointable,
    save_dir: str | Path,
    tag: str | None = None,
    client_state: dict[str, Any] | None = None,
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
) -> bool:
    """Write everything that training needs to go on into ``save_dir/tag``. All ranks call it.

    Args:
        tag: name of the checkpoint, default ``global_step{N}``.
        client_state: kept with it and given back by ``load_checkpoint``: rank 0's, to all ranks.
        save_latest: let the file ``latest`` name this checkpoint.
        exclude_frozen_parameters: leave out what no optimizer updates.

    Raises:
        CheckpointError: it could not be written whole; what was there before is as it was.
    """
    axis = engine.axis
    tag = _agree_on_tag(engine, f"global_step{engine.global_steps}" if tag is None else str(tag))
    target = Path(save_dir) / tag
    staged = share(axis, target.with_name(f".{target.name}.saving-{uuid.uuid4().hex[:12]}"))
    try:
        with together(axis, f"saving {target}"):
            common = _common_state(engine, client_state)
            if axis.rank == 0:
                _remove_leftovers(target, staged)
            staged.mkdir(parents=True, exist_ok=True)
            report = _write_rank(engine, staged, common, exclude_frozen_parameters)
        reports = collect(axis, report)
        with together(axis, f"saving {target}"):
            if axis.rank == 0:
                _complete(engine, staged, target, reports, exclude_frozen_parameters)
                _announce(Path(save_dir), tag, save_latest)
    except BaseException:
        if axis.rank == 0:
            shutil.rmtree(staged, ignore_errors=True)
        raise
    return True


def _agree_on_tag(engine: Checkpointable, tag: str) -> str:
    """Rank 0's tag, after ``checkpoint.tag_validation`` has compared all ranks' and it was found to stay inside."""
    mode = str(engine.settings.checkpoint.tag_validation).lower()
    tags = collect(engine.axis, tag)
    if len(set(tags)) > 1 and mode != "ignore":
        message = f"ranks want to save under different tags: {sorted(set(tags))}; give every rank the same tag"
        if mode == "fail":
            raise CheckpointError(message + ' (checkpoint.tag_validation is "Fail")')
        if engine.axis.rank == 0:
            logger.warning("%s; %r of rank 0 is used", message, tags[0])
    path = PurePosixPath(tags[0])
    if not path.parts or path.is_absolute() or ".." in path.parts or any(c in tags[0] for c in "\0\n\\"):
        raise CheckpointError(f"{tags[0]!r} cannot be a checkpoint's tag: use the name of a folder inside save_dir")
    return tags[0]


# -- what each rank writes ------------------------------------------------------------------------------------------


def _write_rank(
    engine: Checkpointable, folder: Path, common: dict[str, Any] | None, exclude_frozen: bool
) -> RankReport:
    """Write this rank's files and say what is in them."""
    rank = engine.axis.rank
    report = RankReport()
    entries: dict[str, TensorEntry] = {}
    irregular: list[dict[str, Any]] = []
    for index, buffer in enumerate(flat_buffers(engine)):
        if is_left_out(buffer.params, exclude_frozen):
            continue
        entries.update(_value_entry(engine, index, buffer))
        if engine.optimizer is not None and engine.optimizer.master(buffer) is not None:
            entries.update(_moment_entries(engine, index, buffer))
            _report_states(engine, buffer, report, irregular)
    if rank == 0:
        entries.update(_whole_entries(engine, exclude_frozen))
    name = tensors_name(rank)
    report.files[name] = write_tensors(folder / name, entries)
    name = optimizer_states_name(rank, bf16=bool(engine.settings.bf16.enabled))
    report.files[name] = write_pickled(folder / name, _rank_state(engine, irregular))
    sharded = engine.plan.shards_parameters
    if rank == 0 or sharded:
        name = model_states_name(rank, sharded=sharded)
        report.files[name] = write_pickled(folder / name, {**_identity(engine), **(common or {})})
    return report


def _value_entry(engine: Checkpointable, index: int, buffer: FlatBuffer) -> dict[str, TensorEntry]:
    """This rank's shard of the masters, which 16-bit values are made from; of the values where there are none."""
    master = None if engine.optimizer is None else engine.optimizer.master(buffer)
    if master is None:
        return {flat_key(index, "weight"): TensorEntry.of(buffer.shard)}
    return {flat_key(index, "master"): TensorEntry.of(_own_part(engine, buffer, master))}


def _own_part(engine: Checkpointable, buffer: FlatBuffer, owned: Tensor) -> Tensor:
    """The rank's shard of a state; ranks that all hold the whole share the writing of it."""
    assert engine.optimizer is not None
    low, high = buffer.layout.shard_range(buffer.axis.rank)
    return owned[low:high] if engine.optimizer.whole else owned


def _moment_entries(engine: Checkpointable, index: int, buffer: FlatBuffer) -> dict[str, TensorEntry]:
    optimizer = engine.optimizer
    assert optimizer is not None
    dtypes: dict[str, torch.dtype] = {}
    for segment in segments_of(optimizer, buffer):
        for key, moment in kinds(optimizer, segment).moments.items():
            dtypes.setdefault(key, moment.dtype)

    def read(key: str, dtype: torch.dtype) -> Tensor:
        whole = optimizer.moment(buffer, key)
        assert whole is not None
        return _own_part(engine, buffer, whole).to(dtype)

    shape = (buffer.layout.shard_numel,)
    return {
        flat_key(index, key): TensorEntry(shape, dtype, lambda key=key, dtype=dtype: read(key, dtype))  # type: ignore[misc]
        for key, dtype in dtypes.items()
    }


def _report_states(
    engine: Checkpointable, buffer: FlatBuffer, report: RankReport, irregular: list[dict[str, Any]]
) -> None:
    optimizer = engine.optimizer
    assert optimizer is not None
    for piece in pieces(engine, buffer):
        found = kinds(optimizer, piece.segment)
        report.groups[piece.name] = piece.segment.group
        report.states[piece.name] = list(found.moments)
        report.scalars[piece.name] = {key: encode_scalar(value) for key, value in found.scalars.items()}
        if found.irregular:
            check_loadable(found.irregular, f"the optimizer's state of {piece.name}")
            where = (piece.name, piece.fragment.start, piece.fragment.numel)
            report.irregular.append(where)
            irregular.append({"where": where, "state": found.irregular})


def _whole_entries(engine: Checkpointable, exclude_frozen: bool) -> dict[str, TensorEntry]:
    """What lies whole on every rank and is written by rank 0."""
    entries = {
        loose_key(name): TensorEntry.of(param.detach().reshape(-1))
        for name, param in loose_parameters(engine).items()
        if not is_left_out([param], exclude_frozen)
    }
    buffers, _ = module_buffers(engine.module)
    entries.update({buffer_key(name): TensorEntry.of(value) for name, value in buffers.items()})
    return entries


# -- what is not tensors --------------------------------------------------------------------------------------------


def _identity(engine: Checkpointable) -> dict[str, Any]:
    return {"rank": engine.axis.rank, "dp_world_size": engine.axis.world_size, "mp_world_size": 1, **counters(engine)}


def _rank_state(engine: Checkpointable, irregular: list[dict[str, Any]]) -> dict[str, Any]:
    """What each rank keeps for itself."""
    rng: dict[str, Tensor] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        rng["cuda"] = torch.cuda.get_rng_state()
    state = {**_identity(engine), "rng": rng, "irregular": irregular}
    if engine.optimizer is not None:  # counters that each rank keeps for itself, such as those of stochastic rounding
        state["param_groups"] = [_options(group) for group in engine.optimizer.param_groups]
    return state


def _common_state(engine: Checkpointable, client_state: dict[str, Any] | None) -> dict[str, Any] | None:
    """What is one for all ranks; rank 0 writes it."""
    client_state = {} if client_state is None else client_state
    check_loadable(client_state, "client_state")
    if engine.axis.rank != 0:
        return None
    state: dict[str, Any] = {"client_state": client_state, "lr_scheduler": None}
    state["extra_state"] = {name: child.get_extra_state() for name, child in extra_states(engine.module).items()}
    check_loadable(state["extra_state"], "the extra state of the model")
    if hasattr(engine.lr_scheduler, "state_dict"):
        state["lr_scheduler"] = engine.lr_scheduler.state_dict()
        check_loadable(state["lr_scheduler"], "the state of the learning-rate scheduler")
    if engine.optimizer is not None:
        scaler = engine.optimizer.loss_scaler
        state["loss_scaler"] = {"kind": type(scaler).__name__, "state": scaler.state_dict()}
        state["param_groups"] = [_options(group) for group in engine.optimizer.param_groups]
    return state


def _options(group: dict[str, Any]) -> dict[str, Any]:
    options, left_out = drop_unloadable({key: value for key, value in group.items() if key != "params"})
    if left_out:
        warn_once(f"options {left_out} of the optimizer's groups are objects that a checkpoint cannot hold: left out")
    return options


# -- making it visible ----------------------------------------------------------------------------------------------


def _complete(
    engine: Checkpointable, staged: Path, target: Path, reports: list[RankReport], exclude_frozen: bool
) -> None:
    """Rank 0: manifest and script, then the rename that makes the checkpoint exist."""
    for rank, report in enumerate(reports):
        for name, nbytes in report.files.items():
            path = staged / name
            if not path.is_file() or path.stat().st_size != nbytes:
                raise CheckpointError(
                    f"rank 0 does not see {path}, which rank {rank} wrote: save_dir must be on a file system that all "
                    "ranks share"
                )
    common_file = model_states_name(0, sharded=engine.plan.shards_parameters)
    manifest = build_manifest(engine, target.name, reports, common_file, exclude_frozen)
    write_text(staged / SCRIPT, _script(), 0o755)
    write_text(staged / zero_to_fp32.MANIFEST, json.dumps(manifest))
    sync_folder(staged)
    former = target.with_name(f".{target.name}.old-{uuid.uuid4().hex[:12]}")
    replaced = os.path.lexists(target)
    if replaced:
        os.rename(target, former)  # a reader that comes now finds it: zero_to_fp32.recover
    try:
        os.rename(staged, target)
    except OSError:
        if replaced:
            os.rename(former, target)
        raise
    sync_folder(target.parent)
    if replaced:
        _remove(former)


def _announce(save_dir: Path, tag: str, save_latest: bool) -> None:
    """Rank 0: let ``latest`` name the checkpoint, and put the script where DeepSpeed's users look for it."""
    if save_latest:
        replace_text(save_dir / "latest", tag)
    replace_text(save_dir / SCRIPT, _script(), 0o755)


def _script() -> str:
    return Path(zero_to_fp32.__file__).read_text(encoding="utf-8")


def _remove_leftovers(target: Path, staged: Path) -> None:
    """Remove what processes that were killed while saving this tag have left, never the only whole checkpoint."""
    name = glob.escape(target.name)
    for path in target.parent.glob(f".{name}.saving-*"):
        if path != staged:  # other ranks may be at work in it already
            _remove(path)
    if target.exists():
        for path in target.parent.glob(f".{name}.old-*"):
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)
