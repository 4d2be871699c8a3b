"""Giving the optimizer its states back, whatever the layout they were saved in.

One buffer's moment is in memory at a time beside the optimizer's own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_hf.checkpoint.complete import bound_names, lacking_states, place_of
from ds_hf.checkpoint.format import SavedParameter
from ds_hf.checkpoint.manifest import Manifest
from ds_hf.checkpoint.scalars import newest
from ds_hf.checkpoint.source import Source
from ds_hf.engine.checkpoint.agreement import collect
from ds_hf.engine.checkpoint.live import Checkpointable, flat_buffers, names_of, world_of
from ds_hf.engine.checkpoint.resume import Fit
from ds_hf.engine.checkpoint.states import SCRIPTS_OWN, OwnedPiece, decode_scalar, made, pieces, segments_of, unpacked
from ds_hf.engine.optim.sharded import Segment, ShardedOptimizer
from ds_hf.engine.optim.streaming import is_known, library_of
from ds_hf.engine.optim.zenflow.rounds import ROUNDS
from ds_hf.engine.zero.buffer import FlatBuffer
from ds_hf.errors import CheckpointError
from ds_hf.log import logger, warn_once

__all__ = [
    "check_options",
    "check_pieces",
    "check_rule",
    "check_states",
    "restore_feedback",
    "restore_groups",
    "restore_states",
]

# Rules whose implementations have the same states; those of others are compared by the name of the class alone.
_RULES = (
    "muon",
    "adagrad",
    "adafactor",
    "adamax",
    "nadam",
    "radam",
    "sparseadam",
    "adam",
    "lamb",
    "lion",
    "rmsprop",
    "rprop",
    "sgd",
)

# Sums and means of squares, and sizes.
_NEVER_NEGATIVE = ("exp_avg_sq", "max_exp_avg_sq", "sum", "square_avg", "acc_delta", "exp_inf")
# Written into a group by steps alone: a checkpoint from before the first one has none.
_COUNTED = ("roundings", ROUNDS)
# How the update is computed, not what: these fit the device it runs on now.
_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")


def check_pieces(engine: Checkpointable, manifest: Manifest, fit: Fit) -> None:
    """Refuse states that depend on the shape of a piece, such as factored moments, if this engine has other pieces.

    Raises:
        CheckpointError: with the parameter's name.
    """
    assert engine.optimizer is not None
    saved_optimizer = manifest.extra.get("optimizer") or {}
    bound = bound_names(manifest, str(saved_optimizer.get("class", "")))
    for buffer in flat_buffers(engine):
        if not bound or not engine.optimizer.updates(buffer):
            continue
        for piece in pieces(engine, buffer):
            saved = fit.parameters.get(piece.name)
            if saved is None or saved.name not in bound:
                continue
            whole = saved_optimizer.get("whole") is True
            slices = {fragment.cut for fragment in saved.fragments}
            known = (
                [(0, saved.numel if cut is None else cut.numel(saved.shape), cut) for cut in slices]
                if whole
                else [(f.start, f.numel, f.cut) for f in saved.fragments]
            )
            if (piece.fragment.start, piece.fragment.numel, piece.cut) not in known:
                raise CheckpointError(
                    f"{saved_optimizer.get('class')} keeps state for {piece.name} that cannot be divided again, and "
                    f"it was saved for other pieces: load with world size {manifest.world_size}, the mesh and the "
                    "stage that saved it, or with load_optimizer_states=False"
                )


@torch.no_grad()
def restore_states(engine: Checkpointable, fit: Fit, source: Source, irregular: Sequence[dict[str, Any]]) -> None:
    """Fill the optimizer's state for everything this rank owns.

    Args:
        irregular: entries of the ranks' pickled files.

    Raises:
        CheckpointError: a state cannot have such values, as where files have been exchanged.
    """
    optimizer = engine.optimizer
    assert optimizer is not None
    known = {_hashable(entry["where"]): entry for entry in irregular}
    same = type(optimizer.optimizer).__name__ == (source.manifest.extra.get("optimizer") or {}).get("class")
    for buffer in flat_buffers(engine):
        if not optimizer.updates(buffer):
            continue
        _part(engine, buffer, fit)
        optimizer.store.visit(buffer)
        owned = pieces(engine, buffer)
        found = [(piece, fit.parameters[piece.name]) for piece in owned if piece.name in fit.parameters]
        for segment in segments_of(optimizer, buffer):
            _forget(optimizer, segment)
        _restore_moments(optimizer, buffer, found, source)
        _restore_scalars(optimizer, found, source)
        for piece, _ in found:
            if piece.where in known:
                entry, param = known[piece.where], piece.segment.param
                state, device = optimizer.state[param], param.device
                state.update(_on_device(entry["state"], device))
                for key, packed in entry.get("packed", {}).items() if same else ():
                    value = unpacked(packed, device)
                    state.update({} if value is None else {key: value})
                for key, saved in entry.get("objects", {}).items() if same else ():
                    state[key] = made(optimizer, saved, device)


def _part(engine: Checkpointable, buffer: FlatBuffer, fit: Fit) -> None:
    """Let parameters that have made another number of steps, or none, have segments of their own."""
    optimizer = engine.optimizer
    assert optimizer is not None
    saved = [fit.parameters.get(name) for name in names_of(engine, buffer)]
    keys = [None if each is None else (tuple(each.moments), repr(sorted(each.scalars.items()))) for each in saved]
    gradient = next(gradient for gradient in optimizer.segments if gradient.buffer is buffer)
    optimizer.part(gradient, keys)


def _hashable(where: Any) -> Any:
    return tuple(map(_hashable, where)) if isinstance(where, list | tuple) else where


def _forget(optimizer: ShardedOptimizer, segment: Segment) -> None:
    """Bring the segment's state to what it was before the first step."""
    initial = optimizer.defaults.get("initial_accumulator_value")
    if initial is None:
        optimizer.state.pop(segment.param, None)
        return
    for value in optimizer.state.get(segment.param, {}).values():  # Adagrad makes its state at construction
        if isinstance(value, Tensor):
            value.fill_(initial if value.dim() else 0)


def _restore_moments(
    optimizer: ShardedOptimizer, buffer: FlatBuffer, found: list[tuple[OwnedPiece, SavedParameter]], source: Source
) -> None:
    files, numel, device = source.files, optimizer.masters[buffer].numel(), optimizer.states_device(buffer)
    for key in dict.fromkeys(key for _, saved in found for key in saved.moments):
        holders = [(piece, saved) for piece, saved in found if key in saved.states]
        first = holders[0][1]
        dtype = files.piece(first.fragments[0].file, first.states[key]).dtype
        flat = torch.empty(numel, dtype=dtype, device=device)
        end = 0
        for piece, saved in holders:
            start = piece.fragment.shard_start
            flat[end:start].zero_()
            end = start + piece.fragment.numel
            files.fill(flat[start:end], saved, key, piece.fragment.start, piece.cut)
        flat[end:].zero_()
        if not _can_be(key, flat):
            for piece, saved in holders:
                start = piece.fragment.shard_start
                _check_values(source, saved, key, flat[start : start + piece.fragment.numel])
        segments = {id(piece.segment): piece.segment for piece, _ in holders}
        if len(segments) == len(segments_of(optimizer, buffer)) and is_known(optimizer.optimizer):
            optimizer.set_moment(buffer, key, flat, take=True)
            continue
        # Rules that keep different states for different shapes, and those of other libraries, which choose the dtype.
        for segment in segments.values():
            optimizer.state[segment.param][key] = flat[segment.start : segment.end].view(segment.shape).clone()


def _can_be(key: str, values: Tensor) -> bool:
    """Whether all are finite, and not negative where they are sums or means of squares or sizes."""
    if not values.numel() or not values.is_floating_point():
        return True
    low, high = torch.stack(torch.aminmax(values)).tolist()
    return math.isfinite(low) and math.isfinite(high) and (low >= 0 or key not in _NEVER_NEGATIVE)


def _check_values(source: Source, saved: SavedParameter, key: str, values: Tensor) -> None:
    """Refuse negative values where there cannot be any, and tell of those that are not finite."""
    if _can_be(key, values):
        return
    if key in _NEVER_NEGATIVE and (values < 0).any():
        raise CheckpointError(
            f"{place_of(source, saved, key)} has negative values, which {key} of an optimizer never has: it is "
            "damaged, or another state's (exp_avg in the place of exp_avg_sq). Copy the checkpoint again, or load with "
            "load_optimizer_states=False"
        )
    warn_once(
        f"{place_of(source, saved, key)} has values that are not finite (said once, for the first): they are loaded "
        f"as they are, and the next step spreads them to {saved.name}. Load an earlier checkpoint, or with "
        "load_optimizer_states=False",
        about="states that are not finite",
        everywhere=True,  # each process sees what it owns
    )


def _restore_scalars(
    optimizer: ShardedOptimizer, found: list[tuple[OwnedPiece, SavedParameter]], source: Source
) -> None:
    values: dict[int, tuple[Segment, dict[str, list[Any]]]] = {}
    for piece, saved in found:
        _, collected = values.setdefault(id(piece.segment), (piece.segment, {}))
        for key, value in saved.scalars.items():
            number = value[1] if isinstance(value, list) and len(value) == 2 else None
            if isinstance(number, float):
                _check_values(source, saved, key, torch.tensor([number]))
            collected.setdefault(key, []).append(value)
    for segment, collected in values.values():
        for key, candidates in collected.items():
            value = candidates[0] if all(c == candidates[0] for c in candidates) else newest(candidates)
            optimizer.state[segment.param][key] = decode_scalar(optimizer, segment, key, value)


def _on_device(state: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in state.items()}


def check_rule(optimizer: ShardedOptimizer, manifest: Manifest) -> None:
    """Refuse states of another rule: its moments have the same names and mean something else.

    Implementations of one rule may change, for example with offload. Classes that are not known are let through, with a
    warning, and so is one of another library: bitsandbytes has an ``AdamW``, too.

    Raises:
        CheckpointError: with both names.
    """
    entry = manifest.extra.get("optimizer") or {}
    saved, live = str(entry.get("class", "")), type(optimizer.optimizer).__name__
    libraries = str(entry.get("library", "")), library_of(optimizer.optimizer)
    rules = [next((rule for rule in _RULES if rule in name.lower()), None) for name in (saved, live)]
    if not saved or saved == live or (rules[0] == rules[1] and rules[0] is not None):
        if libraries[0] not in ("", libraries[1]) and optimizer.axis.rank == 0:
            logger.warning(
                "%s was saved with %s of %s, and this one is %s of %s. Its states have other names, so that it goes on "
                "without them or ends in an error: train with the one that it was, or load with "
                "load_optimizer_states=False", manifest.folder, saved, libraries[0], live, libraries[1],
            )  # fmt: skip
        return
    if None not in rules:
        named = re.sub("^(Fused|DeepSpeedCPU)", "", saved)  # as a file names it, which does not choose the kernels
        rule = "Adam or AdamW, as it was" if rules[0] == "adam" else named
        raise CheckpointError(
            f"{manifest.folder} was saved with the optimizer {saved}, and this one is {live}: train with {rule}, or "
            "load with load_optimizer_states=False"
        )
    if optimizer.axis.rank == 0:
        logger.warning("%s was saved with the optimizer %s, and this one is %s", manifest.folder, saved, live)


def check_states(engine: Checkpointable, source: Source, fit: Fit) -> None:
    """Refuse states of which some are missing: training would go on with zeros in their place.

    Raises:
        CheckpointError: with the parameter, the state and, where each has one, the file.
    """
    assert engine.optimizer is not None
    rule, known = type(engine.optimizer.optimizer).__name__, is_known(engine.optimizer.optimizer)
    for fault in lacking_states(source, fit.parameters.values(), rule, known=known):
        raise CheckpointError(
            f"{fault}. The checkpoint is incomplete: copy it again, or load with load_optimizer_states=False"
        )


def check_options(optimizer: ShardedOptimizer, saved: list[dict[str, Any]], where: str) -> None:
    """Refuse options that are of another kind than the live ones, which only the next step would find out.

    Raises:
        CheckpointError: with the name of the option.
    """
    live = len(optimizer.param_groups)
    if len(saved) != live:
        used = {segment.group for segments in optimizer.segments.values() for segment in segments}
        frozen = " (groups of which all parameters are frozen count, too: leave them out where it has none)"
        raise CheckpointError(
            f"the optimizer has {live} parameter groups, {where} has {len(saved)}: build the same groups"
            f"{frozen if len(used) < live else ''}, or load with load_optimizer_states=False"
        )
    for index, (group, options) in enumerate(zip(optimizer.param_groups, saved, strict=True)):
        for key, value in options.items():
            if (
                key in group
                and key not in ("params", *SCRIPTS_OWN)
                and key not in _IMPLEMENTATION
                and not _alike(group[key], value)
            ):
                raise CheckpointError(f"{where}: option {key!r} of parameter group {index} is {value!r:.80}")


def _alike(live: Any, saved: Any) -> bool:
    if live is None or saved is None:
        return True
    if isinstance(live, list | tuple):
        same = isinstance(saved, list | tuple) and len(live) == len(saved)
        return same and all(_alike(a, b) for a, b in zip(live, saved, strict=True))
    if isinstance(live, bool | int | float) or (isinstance(live, Tensor) and live.numel() == 1):
        return isinstance(saved, bool | int | float) or (isinstance(saved, Tensor) and saved.numel() == 1)
    return True


def restore_groups(optimizer: ShardedOptimizer, saved: list[dict[str, Any]]) -> None:
    """Options of the saved groups into the live dictionaries, which schedulers hold on to.

    Options that the live groups lack are added, as torch does, and go with the next load: a stray one does not stay.
    """
    for index, key in optimizer.brought:
        optimizer.param_groups[index].pop(key, None)
    optimizer.brought.clear()
    for index, (group, options) in enumerate(zip(optimizer.param_groups, saved, strict=True)):
        for key in _COUNTED:
            group.pop(key, None)
        optimizer.brought.update(
            (index, key) for key in options.keys() - group.keys() - {"params", *SCRIPTS_OWN, *_COUNTED}
        )
        for key, value in options.items():
            if key in ("params", *SCRIPTS_OWN) or (key in _IMPLEMENTATION and key in group):
                continue
            live = group.get(key)
            if isinstance(live, Tensor):  # a captured graph may read this very tensor
                live.fill_(float(value))
            else:
                group[key] = value.item() if isinstance(value, Tensor) and isinstance(live, float) else value


def restore_feedback(engine: Checkpointable, own: dict[str, Any] | None, folder: Path) -> None:
    """What rounding of gradients has lost (LoCo), where as many processes saved it; else it begins with nothing, and
    that is told once. Collective.

    Args:
        own: what this rank keeps for itself, ``None`` where the checkpoint has no such.
    """
    assert engine.optimizer is not None
    feedback = engine.optimizer.feedback
    if not feedback:
        return
    world = world_of(engine)
    kept = None if own is None else own.get("feedback")
    shards = [buffer.layout.shard_numel for _, buffer in feedback]
    found = collect(world, _errors_in(kept, shards))
    if found[0] is None or any(other != found[0] for other in found):
        if world.rank == 0:
            logger.warning(
                "%s was saved by other processes or without zeropp_loco_param: what rounding of gradients has lost "
                "begins with nothing",
                folder,
            )
        return
    for (blocks, buffer), each in zip(feedback, kept or (), strict=True):
        blocks.take_errors(each, buffer.device)


def _errors_in(kept: Any, shards: Sequence[int]) -> list[bool] | None:
    """Which of the sums had errors; ``None`` if these are not errors of such shards."""
    if not isinstance(kept, list) or len(kept) != len(shards):
        return None
    for each, numel in zip(kept, shards, strict=True):
        if not isinstance(each, dict) or type(each.get("sums")) is not int:
            return None
        errors = each.get("errors")
        if errors is not None and not (
            isinstance(errors, Tensor) and errors.dtype is torch.bfloat16 and errors.shape == (numel,)
        ):
            return None
    return [each["errors"] is not None for each in kept]
