"""Whether what was restored is what was saved: digests of the live engine against those in the manifest.

Compared is what was not converted: tensors of the dtype they were saved in, a scheduler and a scaler of the same class,
random states at the same world size. Sums of tensors do not depend on how these are cut, so a load at another world
size, stage or offload is checked as well. All ranks call it and all find the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_hf.checkpoint.digest import digest_of, digests_of, moving
from ds_hf.checkpoint.manifest import Manifest
from ds_hf.checkpoint.reports import RankReport
from ds_hf.checkpoint.scalars import encode_scalar
from ds_hf.engine.checkpoint.agreement import together
from ds_hf.engine.checkpoint.contents import live_entries
from ds_hf.engine.checkpoint.describe import counters
from ds_hf.engine.checkpoint.holders import Holders
from ds_hf.engine.checkpoint.live import Checkpointable, flat_buffers, random_states, world_of
from ds_hf.engine.checkpoint.resume import Fit, same_mesh
from ds_hf.engine.checkpoint.states import kinds, pieces
from ds_hf.engine.comm.collectives import all_reduce_sum
from ds_hf.engine.comm.mesh import compute_device
from ds_hf.errors import CheckpointError

__all__ = ["Restored", "check_restored"]

_LISTED = 10  # names in a message
_VALUES = ("master", "weight", "buffer")
_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")  # how the update is computed: not restored


@dataclass(frozen=True)
class Restored:
    """What was restored besides weights."""

    optimizer: bool
    scheduler: bool
    counters: bool


def check_restored(engine: Checkpointable, holders: Holders, manifest: Manifest, fit: Fit, restored: Restored) -> None:
    """Compare what the engine has now with what was saved; checkpoints without digests pass. Collective.

    Raises:
        CheckpointError: it names what differs.
    """
    digest = manifest.extra.get("digest")
    if digest is None or engine.settings.ds_hf.checkpoint.verify == "sizes":
        return
    axis = world_of(engine)
    doing = f"checking what was read from {manifest.folder}"
    with together(axis, doing):
        expected = _expected(manifest, digest)
        table = _live_sums(engine, holders, fit, expected, restored.optimizer)
    table = all_reduce_sum(table.to(compute_device()), axis, "digests of what was read").cpu()
    with together(axis, doing):
        wrong = list(_different_tensors(manifest, expected, table))
        if restored.optimizer and engine.optimizer is not None:
            wrong += dict.fromkeys(_different_scalars(engine, fit))
            wrong += _different_options(engine, manifest, digest)
            wrong += _different_random_states(engine, manifest, digest)
        wrong += _different_rest(engine, manifest, digest, restored)
        if wrong:
            more = f" and {len(wrong) - _LISTED} more" if len(wrong) > _LISTED else ""
            raise CheckpointError(
                f"{manifest.folder}: what was restored is not what was saved: {', '.join(wrong[:_LISTED])}{more}. The "
                'engine has the restored values now; ds_hf.checkpoint.verify = "sizes" loads without this check'
            )


# -- tensors --------------------------------------------------------------------------------------------------------


def _expected(manifest: Manifest, digest: Any) -> dict[tuple[str, str], tuple[int, int]]:
    """The sums in the manifest, by name and state, in an order that all ranks share."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    tensors = digest.get("tensors") if isinstance(digest, dict) else None
    try:
        if not isinstance(tensors, dict):
            raise ValueError("the table of them is missing")
        for name, states in tensors.items():
            for state, text in states.items():
                if re.fullmatch("[0-9a-f]{32}", text) is None:
                    raise ValueError(f"{text!r} is not a digest")
                found[name, state] = int(text[:16], 16), int(text[16:], 16)
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{manifest.folder}: the digests in the manifest cannot be read: {error}") from error
    return found


def _live_sums(
    engine: Checkpointable,
    holders: Holders,
    fit: Fit,
    expected: dict[tuple[str, str], tuple[int, int]],
    optimizer: bool,
) -> Tensor:
    """``[len(expected), 3]``: this rank's part of each sum, and how many elements it has of it."""
    rows = {key: index for index, key in enumerate(expected)}
    parts: dict[int, list[int]] = {}
    for entry in live_entries(engine, holders, RankReport(), [], copies=True).values():
        for stretch in entry.stretches:
            saved = fit.buffers.get(stretch.name) if stretch.state == "buffer" else fit.parameters.get(stretch.name)
            row = None if saved is None else rows.get((saved.name, entry.state_key(stretch)))
            if row is None or (stretch.state not in _VALUES and not optimizer):
                continue
            found = stretch.sum_of(entry.source.part(stretch.offset, stretch.numel))
            if found is None:
                continue
            total = parts.setdefault(row, [0, 0, 0])
            total[0] += found[0]
            total[1] += found[1]
            total[2] += stretch.numel
    table = torch.zeros(len(expected), 3, dtype=torch.int64)
    for row, numbers in parts.items():
        table[row] = torch.tensor([_signed(number) for number in numbers])
    return table


def _signed(number: int) -> int:
    """The 64-bit integer that is ``number`` modulo 2**64: these wrap around when ranks add theirs."""
    return (number + 2**63) % 2**64 - 2**63


def _different_tensors(
    manifest: Manifest, expected: dict[tuple[str, str], tuple[int, int]], table: Tensor
) -> Iterator[str]:
    for (name, state), (first, second), row in zip(expected, expected.values(), table.tolist(), strict=True):
        kind = state.partition(":")[0]
        if kind == "buffer" and name in manifest.buffers:
            numel = torch.Size(manifest.buffers[name].shape).numel()
        else:
            numel = manifest.parameters[name].numel if name in manifest.parameters else 0
        # Fewer elements: another dtype, not in this model, or slices without a sum. Several times as many: processes
        # that hold the same, or two parameters that were made of one.
        copies = row[2] // numel if numel and row[2] % numel == 0 else 0
        if copies and row[:2] != [_signed(copies * first), _signed(copies * second)]:
            yield f"{name} ({kind})"


# -- the rest -------------------------------------------------------------------------------------------------------


def _different_scalars(engine: Checkpointable, fit: Fit) -> Iterator[str]:
    optimizer = engine.optimizer
    assert optimizer is not None
    for buffer in flat_buffers(engine):
        if not optimizer.updates(buffer):
            continue
        by_segment: dict[int, list[Any]] = {}
        for piece in pieces(engine, buffer):
            if piece.name in fit.parameters:
                by_segment.setdefault(id(piece.segment), []).append((piece, fit.parameters[piece.name]))
        for found in by_segment.values():
            live = kinds(optimizer, found[0][0].segment).scalars
            for key in dict.fromkeys(key for _, saved in found for key in saved.scalars):
                values = {repr(saved.scalars[key]) for _, saved in found if key in saved.scalars}
                if len(values) == 1 and (key not in live or repr(encode_scalar(live[key])) not in values):
                    yield f"{found[0][1].name} ({key})"


def _different_options(engine: Checkpointable, manifest: Manifest, digest: dict[str, Any]) -> Iterator[str]:
    """Options of the parameter groups, learning rates among them; at another world size what all ranks had alike."""
    assert engine.optimizer is not None
    by_rank = digest.get("groups")
    if not isinstance(by_rank, list) or not by_rank:
        return
    world = world_of(engine)
    same = len(by_rank) == world.world_size and same_mesh(engine, manifest)
    for index, group in enumerate(engine.optimizer.param_groups):
        saved = by_rank[world.rank if same else 0][index]
        for key, text in saved.items():
            shared = same or all(groups[index].get(key) == text for groups in by_rank)
            if not shared or key in _IMPLEMENTATION or isinstance(group.get(key), Tensor):
                continue
            if key not in group or digest_of(group[key]) != text:
                yield f"{key} of parameter group {index}"


def _different_random_states(engine: Checkpointable, manifest: Manifest, digest: dict[str, Any]) -> Iterator[str]:
    by_rank, world = digest.get("rng"), world_of(engine)
    if isinstance(by_rank, list) and len(by_rank) == world.world_size and same_mesh(engine, manifest):
        live = digests_of(random_states())
        for name, text in by_rank[world.rank].items():
            if live.get(name, text) != text:
                yield f"random state {name!r} of rank {world.rank}"


def _different_rest(
    engine: Checkpointable, manifest: Manifest, digest: dict[str, Any], restored: Restored
) -> Iterator[str]:
    if restored.scheduler and not _same_state(engine.lr_scheduler, digest.get("lr_scheduler")):
        yield "the learning-rate scheduler"
    scaler = None if engine.optimizer is None else engine.optimizer.loss_scaler
    if restored.optimizer and not _same_state(scaler, digest.get("loss_scaler")):
        yield "the loss scaler"
    if restored.counters:
        now, saved = counters(engine), manifest.extra.get("counters", {})
        for name in ("global_steps", "global_samples", "skipped_steps"):
            if now[name] != saved.get(name, 0):
                yield name
        loader = engine.training_dataloader
        if digest.get("data") and hasattr(loader, "state_dict") and same_mesh(engine, manifest):
            position = loader.state_dict()
            if position.get("samples") != 0 and digest_of(dict(position)) != digest["data"]:  # 0: the next epoch
                yield "the position in the data"


def _same_state(live: Any, saved: Any) -> bool:
    """Whether ``live`` has the state of ``[class, digest]``, or is of another class and cannot have it."""
    return not saved or saved[0] != type(live).__name__ or digest_of(moving(live.state_dict())) == saved[1]
