"""Writing an opened checkpoint as DeepSpeed's own files, at a ZeRO stage and world size of choice.

DeepSpeed reads flat tensors by position, so parameters follow the order of the parameter groups that the manifest
tells; a script that builds its groups in another order cannot load them. The layouts are those that
``import_deepspeed`` describes, with the padding that DeepSpeed expects: at stages 1 and 2 the group is padded to
2 elements a rank, at stage 3 each parameter to equal parts.
"""

from __future__ import annotations

import math
import os
import uuid
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_hf.checkpoint.commit import publish, stage
from ds_hf.checkpoint.convert import state_bytes, target_of
from ds_hf.checkpoint.deepspeed.layout import even_parts, in_order
from ds_hf.checkpoint.deepspeed.pickles import (
    SAVE,
    DynamicScaler,
    FragmentAddress,
    StaticScaler,
    ZeroStage,
    save_pickled,
)
from ds_hf.checkpoint.deepspeed.slices import INFO
from ds_hf.checkpoint.files import model_states_name, optimizer_states_name, replace_text
from ds_hf.checkpoint.format import SavedParameter
from ds_hf.checkpoint.scalars import number
from ds_hf.checkpoint.source import Report, Source
from ds_hf.errors import CheckpointError

__all__ = [
    "DEEPSPEED_VERSION",
    "UNIVERSAL_VERSION",
    "Target",
    "flats_of",
    "model_state",
    "new_save",
    "param_groups_of",
    "scaler_state",
    "write_deepspeed",
]

DEEPSPEED_VERSION = "0.19.8"  # whose layout is written
UNIVERSAL_VERSION = 0.4  # of the information for universal checkpoints
_ALIGNMENT = 2  # elements a rank, at stages 1 and 2
_SUB_GROUP = 10**9  # zero_optimization.sub_group_size: elements of a rank in one flat tensor at stage 3
_SCALE_WINDOW, _HYSTERESIS, _MIN_SCALE = 1000, 2, 1


@dataclass(frozen=True)
class Target:
    """What is written."""

    stage: int
    world_size: int
    sub_group_size: int = _SUB_GROUP

    @property
    def sharded(self) -> bool:
        return self.stage == 3


@dataclass(frozen=True)
class _Flat:
    """Parameters of one flat tensor, and the group whose options they have."""

    group: int
    parameters: list[SavedParameter]


def write_deepspeed(
    source: Source,
    save_dir: str | Path,
    target: Target,
    tag: str | None = None,
    report: Report | None = None,
    *,
    over: bool = False,
) -> Path:
    """Write ``save_dir/tag`` and let ``latest`` name it; returns the folder. One rank's states are in memory at a time.

    Args:
        over: replace a checkpoint that is there.

    Raises:
        CheckpointError: the source has no optimizer states or is damaged, or the tag exists.
    """
    source.check()
    if target.stage not in (1, 2, 3) or target.world_size < 1:
        raise CheckpointError("DeepSpeed's files are written for stage 1, 2 or 3 and at least one rank")
    flats = flats_of(source, target)
    root, folder = target_of(source, save_dir, tag)
    save = new_save()
    bf16 = any(weight.dtype is torch.bfloat16 for weight in source.weights())
    with stage(folder, state_bytes(source), over=over) as staged:
        for rank in range(target.world_size):
            name = optimizer_states_name(rank, bf16=bf16)
            state = _optimizer_state(source, flats, target, rank)
            content = {"optimizer_state_dict": state, "ds_config": {}, "ds_version": DEEPSPEED_VERSION, **save}
            save_pickled(staged / name, content)
            if rank == 0 or target.sharded:
                name = model_states_name(rank, sharded=target.sharded)
                save_pickled(staged / name, {**model_state(source, flats, target, rank), **save})
            if report is not None:
                report(rank + 1, target.world_size)
        publish(staged, folder, over=over)
    replace_text(root / "latest", os.fspath(folder.relative_to(root)))
    return folder


def new_save() -> dict[str, str]:
    """The entry that all files of one save have in common, and no others."""
    return {SAVE: uuid.uuid4().hex}


def flats_of(source: Source, target: Target) -> list[_Flat]:
    """Which parameters lie in which flat tensor.

    Raises:
        CheckpointError: the source has no optimizer states, or blocks of few bits, of which DeepSpeed knows nothing.
    """
    manifest = source.manifest
    manifest.refuse_blocks(manifest.parameters)
    groups = manifest.extra.get("groups")
    if not groups or not isinstance(source.common.get("param_groups"), list):
        raise CheckpointError(f"{source.folder} holds no optimizer states, which DeepSpeed's files need")
    flats: list[_Flat] = []
    for index, names in enumerate(groups):
        found = [manifest.parameters[name] for name in names if name in manifest.parameters]
        lacking = [saved.name for saved in found if "master" not in saved.states]
        if lacking:
            raise CheckpointError(f"{source.folder} has no master weights of {lacking[0]}")
        flats += [_Flat(index, part) for part in (_sub_groups(found, target) if target.sharded else [found])]
    return flats


def _sub_groups(parameters: list[SavedParameter], target: Target) -> Iterator[list[SavedParameter]]:
    part: list[SavedParameter] = []
    held = 0
    for saved in parameters:
        part.append(saved)
        held += -(-saved.numel // target.world_size)
        if held >= target.sub_group_size:
            yield part
            part, held = [], 0
    if part or not parameters:
        yield part


# -- optimizer states -----------------------------------------------------------------------------------------------


def _optimizer_state(source: Source, flats: list[_Flat], target: Target, rank: int) -> dict[str, Any]:
    state: dict[int, dict[str, Any]] = {}
    values: list[Tensor] = []
    for index, flat in enumerate(flats):
        values.append(_partition(source, flat, target, rank, "master"))
        moments = list(dict.fromkeys(key for saved in flat.parameters for key in saved.moments))
        state[index] = {**_scalars(flat.parameters), **{k: _partition(source, flat, target, rank, k) for k in moments}}
    base = {"state": state, "param_groups": param_groups_of(source, flats)}
    common = {"zero_stage": ZeroStage(target.stage), **scaler_state(source)}
    if target.sharded:
        partitions = {"optimizer_state_dict": base, "fp32_flat_groups": values, "partition_count": target.world_size}
        return {**common, **partitions}
    paddings = [_padding(flat, target, rank) for flat in flats]
    return {
        **common,
        "base_optimizer_state": base,
        "single_partition_of_fp32_groups": [v[: v.numel() - p].clone() for v, p in zip(values, paddings, strict=True)],
        "group_paddings": paddings,
        "param_alignment_paddings": [[0] * len(flat.parameters) for flat in flats],
        "partition_count": [target.world_size] * len(flats),
        "ds_version": DEEPSPEED_VERSION,  # no clip_grad: DeepSpeed then keeps what its configuration says
        "param_slice_mappings": [_addresses(flat, target, rank) for flat in flats],
    }


def _part_numel(flat: _Flat, target: Target) -> int:
    """Elements of one rank at stages 1 and 2."""
    total = sum(saved.numel for saved in flat.parameters)
    multiple = _ALIGNMENT * target.world_size
    return -(-total // multiple) * multiple // target.world_size


def _padding(flat: _Flat, target: Target, rank: int) -> int:
    part = _part_numel(flat, target)
    total = sum(saved.numel for saved in flat.parameters)
    return min(max((rank + 1) * part - total, 0), part)


def _addresses(flat: _Flat, target: Target, rank: int) -> OrderedDict[str, FragmentAddress]:
    shapes = {saved.name: saved.shape for saved in flat.parameters}
    placed = in_order(shapes, [_part_numel(flat, target)] * target.world_size)
    return OrderedDict(
        (name, FragmentAddress(numel=row.numel, start=row.offset))
        for name, rows in placed.items()
        for row in rows
        if row.file == str(rank)
    )


def _partition(source: Source, flat: _Flat, target: Target, rank: int, state: str) -> Tensor:
    """The rank's part of a state of a flat tensor, zeros in the padding."""
    shapes = {saved.name: saved.shape for saved in flat.parameters}
    by_name = {saved.name: saved for saved in flat.parameters}
    if target.sharded:
        placed = even_parts(shapes, target.world_size)
        numel = sum(-(-saved.numel // target.world_size) for saved in flat.parameters)
    else:
        numel = _part_numel(flat, target)
        placed = in_order(shapes, [numel] * target.world_size)
    whole = torch.zeros(numel)
    for name, rows in placed.items():
        saved = by_name[name]
        for row in rows:
            if row.file != str(rank):
                continue
            if state in saved.states:
                source.files.fill(whole[row.offset : row.offset + row.numel], saved, state, row.start)
            elif state in saved.scalars and row.numel == 1:  # a parameter of one number: so are its moments
                whole[row.offset] = number(saved.scalars[state])
    return whole


def _scalars(parameters: Sequence[SavedParameter]) -> dict[str, Any]:
    """Scalars beside the moments; DeepSpeed's optimizers and torch's both take the step as a number."""
    found: dict[str, Any] = {}
    for saved in parameters:
        for key, value in saved.scalars.items():
            found[key] = int(number(value)) if key == "step" else number(value)
    return found


def scaler_state(source: Source) -> dict[str, Any]:
    """The loss scaler, and what stands beside it."""
    scaler = _scaler(source)
    return {"loss_scaler": scaler, "dynamic_loss_scale": isinstance(scaler, DynamicScaler), "overflow": False}


def param_groups_of(source: Source, flats: list[_Flat]) -> list[dict[str, Any]]:
    """Options of each group, with the numbers of its flat tensors."""
    needed = {"bias_correction": True, "amsgrad": False}  # by FusedAdam and DeepSpeedCPUAdam
    groups = []
    for index, options in enumerate(source.common["param_groups"]):
        members = [number for number, flat in enumerate(flats) if flat.group == index]
        plain = {k: v.item() if isinstance(v, Tensor) and v.dim() == 0 else v for k, v in options.items()}
        groups.append({**needed, **plain, "params": members})
    return groups


def _scaler(source: Source) -> StaticScaler | DynamicScaler:
    saved = source.common.get("loss_scaler") or {}
    state = saved.get("state") or {}
    if saved.get("kind") != "DynamicLossScaler":
        return StaticScaler(cur_scale=float(state.get("scale", 1.0)), dynamic=False)
    settings = state.get("settings") or {}
    smallest = float(settings.get("min_loss_scale", _MIN_SCALE))
    return DynamicScaler(
        cur_scale=float(state["scale"]),
        dynamic=True,
        cur_iter=int(state.get("boundary", 0)),
        last_overflow_iter=int(state.get("last_overflow", -1)),
        scale_factor=2.0,
        scale_window=int(settings.get("loss_scale_window", _SCALE_WINDOW)),
        min_scale=int(smallest) if smallest.is_integer() else smallest,
        delayed_shift=int(settings.get("hysteresis", _HYSTERESIS)),
        cur_hysteresis=int(state.get("hysteresis_left", _HYSTERESIS)),
        consecutive_hysteresis=bool(settings.get("consecutive_hysteresis", False)),
        raise_error_at_min_scale=True,
        dtype=torch.float16,
    )


# -- the model's file -----------------------------------------------------------------------------------------------


def model_state(source: Source, flats: list[_Flat], target: Target, rank: int) -> dict[str, Any]:
    """The content of a file ``*_model_states.pt``."""
    manifest = source.manifest
    frozen = [saved for saved in manifest.parameters.values() if not any(saved in flat.parameters for flat in flats)]
    counters = manifest.extra.get("counters") or {}
    saves_frozen = target.stage > 1
    state: dict[str, Any] = {
        "module": _module(source, target),
        "buffer_names": list(manifest.buffers),
        "optimizer": None,
        "param_shapes": [OrderedDict((s.name, torch.Size(s.shape)) for s in flat.parameters) for flat in flats],
        "frozen_param_shapes": OrderedDict((s.name, torch.Size(s.shape)) for s in frozen) if saves_frozen else None,
        "shared_params": dict(manifest.tied),
        "frozen_param_fragments": _frozen(source, frozen, target, rank) if saves_frozen else None,
        "lr_scheduler": source.common.get("lr_scheduler"),
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": int(counters.get("skipped_steps", 0)),
        "global_steps": int(counters.get("global_steps", 0)),
        "global_samples": int(counters.get("global_samples", 0)),
        "dp_world_size": target.world_size,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": {},
        "ds_version": DEEPSPEED_VERSION,
    }
    client = dict(source.common.get("client_state") or {})
    if INFO in client and manifest.extra.get("universal"):  # of slices, which are put together now
        client[INFO] = {"universal_checkpoint_version": UNIVERSAL_VERSION}
    return {**state, **client}


def _module(source: Source, target: Target) -> OrderedDict[str, Any]:
    """The state dict; at stage 3 empty tensors stand for parameters."""
    module: OrderedDict[str, Any] = OrderedDict()
    for weight in source.weights():
        if target.sharded and not weight.is_buffer:
            module[weight.name] = torch.empty(0, dtype=weight.dtype)
        else:
            module[weight.name] = weight.read().to(weight.dtype)
    module.update({alias: module[name] for alias, name in source.manifest.tied.items() if name in module})
    module.update(source.common.get("extra_state") or {})
    return module


def _frozen(source: Source, frozen: list[SavedParameter], target: Target, rank: int) -> OrderedDict[str, Tensor]:
    found: OrderedDict[str, Tensor] = OrderedDict()
    dtypes = {weight.name: weight.dtype for weight in source.weights()}
    for saved in frozen:
        value = source.files.value(saved).to(dtypes[saved.name])
        if target.sharded:
            part = math.ceil(saved.numel / target.world_size)
            flat = torch.zeros(part * target.world_size, dtype=value.dtype)
            flat[: saved.numel] = value.reshape(-1)
            value = flat[rank * part : (rank + 1) * part].clone()
        found[saved.name] = value
    return found
