"""Giving the optimizer its states back, whatever the layout they were saved in.

One buffer's moment is in memory at a time beside the optimizer's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ds_hf.engine.checkpoint.fit import Fit
from ds_hf.engine.checkpoint.interface import Checkpointable, flat_buffers
from ds_hf.engine.checkpoint.states import Piece, decode_scalar, newest, pieces, segments_of
from ds_hf.engine.checkpoint.zero_to_fp32 import SavedParameter, TensorFiles
from ds_hf.engine.optim.sharded import Segment, ShardedOptimizer
from ds_hf.engine.zero.buffer import FlatBuffer
from ds_hf.errors import CheckpointError

__all__ = ["restore_groups", "restore_states"]

# How the update is computed, not what: these fit the device it runs on now.
_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")


@torch.no_grad()
def restore_states(engine: Checkpointable, fit: Fit, files: TensorFiles, irregular: Sequence[dict[str, Any]]) -> None:
    """Fill the optimizer's state for everything this rank owns.

    Args:
        irregular: entries of the ranks' pickled files.

    Raises:
        CheckpointError: a state that cannot be cut was saved for other pieces than this engine has.
    """
    optimizer = engine.optimizer
    assert optimizer is not None
    known = {tuple(entry["where"]): entry["state"] for entry in irregular}
    whole_names = {where[0] for where in known}
    for buffer in flat_buffers(engine):
        if optimizer.master(buffer) is None:
            continue
        owned = pieces(engine, buffer)
        found = [(piece, fit.parameters[piece.name]) for piece in owned if piece.name in fit.parameters]
        for segment in segments_of(optimizer, buffer):
            _forget(optimizer, segment)
        _restore_moments(optimizer, buffer, found, files)
        _restore_scalars(optimizer, found)
        for piece, _ in found:
            where = (piece.name, piece.fragment.start, piece.fragment.numel)
            if where in known:
                optimizer.state[piece.segment.param].update(_on_device(known[where], piece.segment.param.device))
            elif piece.name in whole_names:
                raise CheckpointError(
                    f"{type(optimizer.optimizer).__name__} keeps state for {piece.name} that cannot be cut anew, and "
                    "it was saved for other pieces: load with the world size and stage that saved it, or with "
                    "load_optimizer_states=False"
                )


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
    optimizer: ShardedOptimizer, buffer: FlatBuffer, found: list[tuple[Piece, SavedParameter]], files: TensorFiles
) -> None:
    master = optimizer.masters[buffer]
    for key in dict.fromkeys(key for _, saved in found for key in saved.moments):
        holders = [(piece, saved) for piece, saved in found if key in saved.states]
        first = holders[0][1]
        dtype = files.piece(first.fragments[0].file, first.states[key]).dtype
        flat = torch.zeros(master.numel(), dtype=dtype, device=master.device)
        for piece, saved in holders:
            start = piece.fragment.shard_start
            files.fill(flat[start : start + piece.fragment.numel], saved, key, piece.fragment.start)
        segments = {id(piece.segment): piece.segment for piece, _ in holders}
        if len(segments) == len(segments_of(optimizer, buffer)):
            optimizer.set_moment(buffer, key, flat)
            continue
        for segment in segments.values():  # rules that keep different states for different shapes
            optimizer.state[segment.param][key] = flat[segment.start : segment.end].view(segment.shape).clone()


def _restore_scalars(optimizer: ShardedOptimizer, found: list[tuple[Piece, SavedParameter]]) -> None:
    values: dict[int, tuple[Segment, dict[str, list[Any]]]] = {}
    for piece, saved in found:
        _, collected = values.setdefault(id(piece.segment), (piece.segment, {}))
        for key, value in saved.scalars.items():
            collected.setdefault(key, []).append(value)
    for segment, collected in values.values():
        for key, candidates in collected.items():
            value = candidates[0] if all(c == candidates[0] for c in candidates) else newest(candidates)
            optimizer.state[segment.param][key] = decode_scalar(optimizer, segment, key, value)


def _on_device(state: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in state.items()}


def restore_groups(optimizer: ShardedOptimizer, saved: list[dict[str, Any]]) -> None:
    """Options of the saved groups into the live dictionaries, which schedulers hold on to."""
    for group, options in zip(optimizer.param_groups, saved, strict=True):
        for key, value in options.items():
            if key == "params" or (key in _IMPLEMENTATION and key in group):
                continue
            live = group.get(key)
            if isinstance(live, Tensor):  # a captured graph may read this very tensor
                live.fill_(float(value))
            else:
                group[key] = value.item() if isinstance(value, Tensor) and isinstance(live, float) else value
