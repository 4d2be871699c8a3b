"""What one rank puts into a checkpoint: which tensors, what is pickled, and what the others must know of it.

Gathering changes nothing and reads no tensor yet: ``Part.entries`` are read when they are written, or copied for a
write in the background (``snapshot``). Every rank writes its shard of each flat buffer at every stage; what several
ranks hold whole is written by the first of them (``holders``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_hf.checkpoint.digest import digest_of_common, digests_of
from ds_hf.checkpoint.files import (
    StateStretch,
    TensorEntry,
    check_loadable,
    drop_unloadable,
    model_states_name,
    optimizer_states_name,
    pickled,
    tensors_name,
    write_bytes,
    write_tensor_file,
)
from ds_hf.checkpoint.plain import encode, restore
from ds_hf.checkpoint.reports import RankReport, buffer_key, flat_key, loose_key
from ds_hf.checkpoint.scalars import encode_scalar
from ds_hf.dtypes import name_of
from ds_hf.engine.checkpoint.describe import counters
from ds_hf.engine.checkpoint.holders import Holders
from ds_hf.engine.checkpoint.live import (
    Checkpointable,
    aliases,
    cut_in,
    data_position,
    extra_states,
    flat_buffers,
    is_left_out,
    loose_parameters,
    module_buffers,
    names_of,
    random_states,
    world_of,
)
from ds_hf.engine.checkpoint.states import SCRIPTS_OWN, kinds, pieces, plain, segments_of
from ds_hf.engine.zero.buffer import FlatBuffer
from ds_hf.engine.zero.cut import whole_shape
from ds_hf.engine.zero.layout import Fragment
from ds_hf.log import warn_once

__all__ = ["Part", "gather_part", "live_entries", "write_part"]


@dataclass
class Part:
    """One rank's part of a checkpoint.

    Attributes:
        tensors: name of the file for ``entries``.
        pickled: content of the other files, by name.
    """

    report: RankReport
    tensors: str
    entries: dict[str, TensorEntry] = field(default_factory=dict)
    pickled: dict[str, bytes] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes on disk, but for the header of the tensors."""
        return sum(entry.nbytes for entry in self.entries.values()) + sum(map(len, self.pickled.values()))


def gather_part(
    engine: Checkpointable, holders: Holders, client_state: dict[str, Any] | None, exclude_frozen: bool
) -> Part:
    """What this rank would write now.

    Raises:
        CheckpointError: there is something that a checkpoint cannot hold.
    """
    rank = world_of(engine).rank
    part = Part(RankReport(), tensors_name(rank))
    common = _common_state(engine, client_state)
    irregular: list[dict[str, Any]] = []
    part.entries = live_entries(engine, holders, part.report, irregular, exclude_frozen)
    if rank == 0:
        part.report.common = digest_of_common(
            {**common, "lr_scheduler": restore(common["lr_scheduler"], "lr_scheduler")}
        )
    state = _rank_state(engine, irregular)
    part.report.rng = digests_of(state["rng"])
    part.report.optimizer = "" if engine.optimizer is None else type(engine.optimizer.optimizer).__name__
    part.report.options = [digests_of(group) for group in state.get("param_groups", ())]
    name = optimizer_states_name(rank, bf16=bool(engine.settings.bf16.enabled))
    part.pickled[name] = pickled(state)
    sharded = engine.plan.shards_parameters
    if rank == 0 or sharded:
        name = model_states_name(rank, sharded=sharded)
        # What the caller gave stands beside our own keys too, where readers of DeepSpeed's files (Lightning) look.
        client = common["client_state"] if rank == 0 else {}
        part.pickled[name] = pickled({**client, **_identity(engine), **(common if rank == 0 else {})})
    return part


def write_part(folder: Path, part: Part) -> RankReport:
    """Write the files and complete the report with their sizes and sums."""
    report = part.report
    written = {part.tensors: write_tensor_file(folder / part.tensors, part.entries)}
    written.update({name: write_bytes(folder / name, content) for name, content in part.pickled.items()})
    report.files = {name: file.nbytes for name, file in written.items()}
    report.checksums = {name: file.checksum for name, file in written.items()}
    report.sums = written[part.tensors].sums
    return report


# -- tensors --------------------------------------------------------------------------------------------------------


def live_entries(
    engine: Checkpointable,
    holders: Holders,
    report: RankReport,
    irregular: list[dict[str, Any]],
    exclude_frozen: bool = False,
    *,
    copies: bool = False,
) -> dict[str, TensorEntry]:
    """The tensors of this rank's part; ``report`` and ``irregular`` are told of parameters and their states.

    Args:
        copies: also the shards that other processes hold as well and write.
    """
    entries: dict[str, TensorEntry] = {}
    for index, buffer in enumerate(flat_buffers(engine)):
        if is_left_out(engine, buffer.params, exclude_frozen):
            report.excluded += names_of(engine, buffer) if buffer.axis.rank == 0 else []
            continue
        written = [
            copies or holders.writes(buffer.axis, name, cut_in(param))
            for name, param in zip(names_of(engine, buffer), buffer.params, strict=True)
        ]
        if not any(written):
            continue
        _report_fragments(engine, index, buffer, written, report)
        if buffer.dtype is torch.uint8:
            entries.update(_own_entries(engine, buffer, report))
        else:
            entries.update(_value_entry(engine, index, buffer, report))
        if engine.optimizer is not None and engine.optimizer.updates(buffer):
            _report_states(engine, index, buffer, report, irregular)
            entries.update(_moment_entries(engine, index, buffer, report))
    entries.update(_whole_entries(engine, holders, report, exclude_frozen))
    return entries


def _report_fragments(
    engine: Checkpointable, index: int, buffer: FlatBuffer, written: list[bool], report: RankReport
) -> None:
    """The parameters of which this rank's shard has something, or that have no elements."""
    updated = engine.optimizer is not None and engine.optimizer.updates(buffer)
    value = "master" if updated else "weight"
    rows: dict[int, list[list[int]]] = {}
    for fragment in buffer.layout.fragments(buffer.axis.rank):
        row = [fragment.start, fragment.shard_start, fragment.numel]
        rows.setdefault(fragment.slot.index, []).append(row)
    for slot, name, param in zip(buffer.layout.slots, names_of(engine, buffer), buffer.params, strict=True):
        if written[slot.index] and (slot.index in rows or (slot.numel == 0 and buffer.axis.rank == 0)):
            dtype, shape = buffer.form_of(slot)
            report.parameters[name] = _entry(param, shape, dtype, value, flat_key(index, value))
            report.parameters[name]["fragments"] = rows.get(slot.index, [])


def _entry(param: Tensor, shape: torch.Size, dtype: torch.dtype, value: str, key: str) -> dict[str, Any]:
    """What a rank tells of a parameter, but for its fragments."""
    cut = cut_in(param)
    return {
        "shape": list(whole_shape(param, shape)),
        "dtype": name_of(dtype),
        "trainable": param.requires_grad,
        "states": {value: key},
        "cut": None if cut is None else [cut.dim, [list(pair) for pair in cut.ranges]],
    }


def _stretches(engine: Checkpointable, buffer: FlatBuffer, state: str, report: RankReport) -> tuple[StateStretch, ...]:
    """What the elements of the rank's shard are that have the state and are written here."""
    names, params = names_of(engine, buffer), buffer.params
    found = []
    for fragment in buffer.layout.fragments(buffer.axis.rank):
        name, param = names[fragment.slot.index], params[fragment.slot.index]
        entry = report.parameters.get(name)
        if entry is not None and state in entry["states"]:
            place = fragment.start, fragment.shard_start, fragment.numel
            found.append(StateStretch(name, state, *place, tuple(entry["shape"]), cut_in(param)))
    return tuple(found)


def _value_entry(engine: Checkpointable, index: int, buffer: FlatBuffer, report: RankReport) -> dict[str, TensorEntry]:
    """This rank's shard of the masters, which 16-bit values are made from; of the values where there are none."""
    updated = engine.optimizer is not None and engine.optimizer.updates(buffer)
    name = "master" if updated else "weight"
    values = _Values(engine, buffer, updated)
    dtype = engine.optimizer.master_dtype(buffer) if updated and engine.optimizer is not None else buffer.dtype
    stretches = _stretches(engine, buffer, name, report)
    return {flat_key(index, name): TensorEntry((buffer.layout.shard_numel,), dtype, values, stretches)}


def _own_entries(engine: Checkpointable, buffer: FlatBuffer, report: RankReport) -> dict[str, TensorEntry]:
    """What this rank's shard has of packed parameters: a tensor for each, in its dtype, as other stages have it."""
    names, entries = names_of(engine, buffer), {}
    for fragment in buffer.layout.fragments(buffer.axis.rank):
        name, param = names[fragment.slot.index], buffer.params[fragment.slot.index]
        entry, own = report.parameters.get(name), _Own(buffer, fragment)
        if entry is None:
            continue
        start, numel = own.place
        entry["states"], entry["fragments"] = {"weight": loose_key(name)}, [[start, 0, numel]]
        stretches: tuple[StateStretch, ...] = ()
        if order := buffer.order_of(fragment.slot):  # sums are of elements in the order of the model
            entry["order"] = order
        else:
            stretches = (StateStretch(name, "weight", start, 0, numel, tuple(entry["shape"]), cut_in(param)),)
        entries[loose_key(name)] = TensorEntry((numel,), buffer.form_of(fragment.slot)[0], own, stretches)
    return entries


@dataclass(frozen=True)
class _Own:
    """What the rank's shard has of one packed parameter."""

    buffer: FlatBuffer
    fragment: Fragment

    @property
    def place(self) -> tuple[int, int]:
        """The first of the elements in the parameter, and how many there are."""
        itemsize = self.buffer.form_of(self.fragment.slot)[0].itemsize
        return self.fragment.start // itemsize, self.fragment.numel // itemsize

    def value(self) -> Tensor:
        return self.buffer.piece_of(self.buffer.owned(whole=False, write=False), self.fragment)[1]

    def fill(self, target: Tensor) -> None:
        """Copy them."""
        target.copy_(self.value(), non_blocking=True)

    def part(self, offset: int, numel: int) -> Tensor:
        """Some of them."""
        return self.value()[offset : offset + numel]


@dataclass(frozen=True)
class _Values:
    """The rank's shard of master weights or parameters, wherever it is kept."""

    engine: Checkpointable
    buffer: FlatBuffer
    updated: bool

    def value(self) -> Tensor:
        return self.part(0, self.buffer.layout.shard_numel)

    def fill(self, target: Tensor) -> None:
        """Copy them."""
        target.copy_(self.value(), non_blocking=True)

    def part(self, offset: int, numel: int) -> Tensor:
        """Some of them."""
        optimizer = self.engine.optimizer
        if not self.updated or optimizer is None:
            return self.buffer.owned(whole=False, write=False)[offset : offset + numel]
        optimizer.store.visit(self.buffer, write=False)
        if optimizer.whole:  # ranks that all hold the whole share the writing
            offset += self.buffer.layout.shard_range(self.buffer.axis.rank)[0]
        return optimizer.master_part(self.buffer, offset, offset + numel)


def _moment_entries(
    engine: Checkpointable, index: int, buffer: FlatBuffer, report: RankReport
) -> dict[str, TensorEntry]:
    optimizer = engine.optimizer
    assert optimizer is not None
    dtypes: dict[str, torch.dtype] = {}
    for segment in segments_of(optimizer, buffer):
        for key, moment in kinds(optimizer, segment).moments.items():
            dtypes[key] = torch.promote_types(dtypes.get(key, moment.dtype), moment.dtype)
    entries = {}
    for key, dtype in dtypes.items():
        source, known = _Moment(engine, buffer, key, dtype), _stretches(engine, buffer, key, report)
        entries[flat_key(index, key)] = TensorEntry((buffer.layout.shard_numel,), dtype, source, known)
    return entries


@dataclass(frozen=True)
class _Moment:
    """The rank's shard of a moment, put together from the optimizer's segments."""

    engine: Checkpointable
    buffer: FlatBuffer
    key: str
    dtype: torch.dtype

    def _held(self) -> Iterator[tuple[int, int, Tensor]]:
        """Stretches ``(start, end)`` of the shard that have the moment, with their elements."""
        optimizer = self.engine.optimizer
        assert optimizer is not None
        optimizer.store.visit(self.buffer, write=False)
        low, high = self.buffer.layout.shard_range(self.buffer.axis.rank)
        if not optimizer.whole:
            low, high = 0, high - low
        for segment in segments_of(optimizer, self.buffer):
            state = optimizer.state.get(segment.param, {}).get(self.key)
            first, last = max(segment.start, low), min(segment.end, high)
            # The same name may be of a moment in one segment, and of something else in another.
            if isinstance(state, Tensor) and state.shape == segment.param.shape and first < last:
                yield first - low, last - low, plain(state).reshape(-1)[first - segment.start : last - segment.start]

    def value(self) -> Tensor:
        assert self.engine.optimizer is not None
        device = self.engine.optimizer.states_device(self.buffer)
        made = torch.empty(self.buffer.layout.shard_numel, dtype=self.dtype, device=device)
        self.fill(made)
        return made

    def fill(self, target: Tensor) -> None:
        """What is between the segments is zero."""
        end = 0
        for first, last, elements in self._held():
            target[end:first].zero_()
            target[first:last].copy_(elements, non_blocking=True)
            end = last
        target[end:].zero_()

    def part(self, offset: int, numel: int) -> Tensor:
        """No segment ends inside a parameter's fragment."""
        for first, last, elements in self._held():
            if first <= offset and offset + numel <= last:
                return elements[offset - first : offset - first + numel]
        raise AssertionError(f"{self.key} of elements {offset} to {offset + numel} lies in no segment")


def _report_states(
    engine: Checkpointable, index: int, buffer: FlatBuffer, report: RankReport, irregular: list[dict[str, Any]]
) -> None:
    optimizer = engine.optimizer
    assert optimizer is not None
    for piece in pieces(engine, buffer):
        entry = report.parameters.get(piece.name)  # none: another rank writes it
        if entry is None:
            continue
        found = kinds(optimizer, piece.segment)
        report.groups[piece.name] = piece.segment.group
        entry["states"].update((key, flat_key(index, key)) for key in found.moments)
        entry["scalars"] = {key: encode_scalar(value) for key, value in found.scalars.items()}
        beside = {name: value for name, value in (("packed", found.packed), ("objects", found.objects)) if value}
        if found.irregular or beside:
            kept = {"state": found.irregular, **beside}
            check_loadable(kept, f"the optimizer's state of {piece.name}")
            irregular.append({"where": piece.where, **kept})
            report.packs |= bool(found.packed)
        if found.irregular or found.objects:
            report.irregular.append(piece.where)


def _whole_entries(
    engine: Checkpointable, holders: Holders, report: RankReport, exclude_frozen: bool
) -> dict[str, TensorEntry]:
    """What lies whole on several ranks, of which this is the first."""
    entries: dict[str, TensorEntry] = {}
    for name, param in loose_parameters(engine).items():
        cut = cut_in(param)
        if not holders.writes_whole(name, cut):
            continue
        if is_left_out(engine, [param], exclude_frozen):
            report.excluded.append(name)
            continue
        key = loose_key(name)
        entry = report.parameters[name] = _entry(param, param.shape, param.dtype, "weight", key)
        numel = param.numel()
        entry["fragments"] = [[0, 0, numel]] if numel else []
        stretches = [StateStretch(name, "weight", 0, 0, numel, tuple(entry["shape"]), cut)] if numel else []
        entries[key] = TensorEntry.of(param.detach().reshape(-1), stretches)
    buffers, tied = module_buffers(engine.module)
    for name, value in buffers.items():
        if name in holders.own:
            report.excluded.append(name)
        elif holders.writes_whole(name):
            report.buffers[name] = {"shape": list(value.shape), "dtype": name_of(value.dtype)}
            entries[buffer_key(name)] = TensorEntry.of(value, StateStretch.whole(name, "buffer", value))
    if not holders.alike or holders.rank == 0:
        report.tied = {**aliases(engine), **tied}
    return entries


# -- what is not tensors --------------------------------------------------------------------------------------------


def _identity(engine: Checkpointable) -> dict[str, Any]:
    sizes = {"dp_world_size": engine.axis.world_size, "mp_world_size": engine.mesh.shape.model}
    return {"rank": world_of(engine).rank, **sizes, **counters(engine)}


def _rank_state(engine: Checkpointable, irregular: list[dict[str, Any]]) -> dict[str, Any]:
    """What each rank keeps for itself."""
    state: dict[str, Any] = {**_identity(engine), "rng": random_states(), "irregular": irregular}
    stage = engine.settings.zero_optimization.stage  # for readers of DeepSpeed's files
    state["optimizer_state_dict"] = {"zero_stage": stage, "partition_count": engine.axis.world_size}
    if engine.optimizer is not None:  # with counters of each rank's own, such as those of stochastic rounding
        state["param_groups"] = [_options(group) for group in engine.optimizer.param_groups]
        if feedback := engine.optimizer.feedback:
            state["feedback"] = [blocks.kept_errors() for blocks, _ in feedback]
    return state


def _common_state(engine: Checkpointable, client_state: dict[str, Any] | None) -> dict[str, Any]:
    """What is one for all ranks; rank 0 writes it."""
    if world_of(engine).rank != 0:
        return {}
    client_state = {} if client_state is None else encode(client_state, "client_state")
    state: dict[str, Any] = {"client_state": client_state, "lr_scheduler": None, "data": data_position(engine)}
    extra = {name: child.get_extra_state() for name, child in extra_states(engine.module).items()}
    state["extra_state"] = encode(extra, "the extra state of the model", strict=True)
    if hasattr(engine.lr_scheduler, "state_dict"):
        kept = engine.lr_scheduler.state_dict()
        state["lr_scheduler"] = encode(kept, "the state of the learning-rate scheduler", strict=True)
        state["lr_scheduler_kind"] = type(engine.lr_scheduler).__name__
    if engine.kept:
        kept = {name: feature.state_dict() for name, feature in engine.kept.items()}
        state["features"] = encode(kept, "what features keep", strict=True)
    if engine.optimizer is not None:
        scaler = engine.optimizer.loss_scaler
        state["loss_scaler"] = {"kind": type(scaler).__name__, "state": scaler.state_dict()}
        state["param_groups"] = [_options(group) for group in engine.optimizer.param_groups]
    return state


def _options(group: dict[str, Any]) -> dict[str, Any]:
    options, left_out = drop_unloadable(
        {key: value for key, value in group.items() if key not in ("params", *SCRIPTS_OWN)}
    )
    if left_out:
        warn_once(f"options {left_out} of the optimizer's groups are objects that a checkpoint cannot hold: left out")
    return options
