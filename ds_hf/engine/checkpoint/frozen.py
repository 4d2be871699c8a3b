"""A few values of frozen weights that a checkpoint does not have: adapters over another base are another model.

Of what rank 0 has in memory, so that nothing is gathered and no file read: at any stage and number of processes it has
the beginning of each buffer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ds_hf.engine.checkpoint.live import Checkpointable, flat_buffers, is_left_out, loose_parameters, names_of
from ds_hf.engine.zero.storage import FileShardStorage
from ds_hf.log import logger

__all__ = ["samples", "tell_base"]

_VALUES = 4  # of a parameter, its first
_PARAMETERS = 128  # at most, spread over the model


def samples(engine: Checkpointable) -> dict[str, list[float]]:
    """By name the first values of frozen parameters, or of some of many. On rank 0."""
    found = dict(_beginnings(engine))
    chosen = list(found)[:: math.ceil(len(found) / _PARAMETERS) or 1]
    return {name: found[name].tolist() for name in chosen if found[name].isfinite().all()}


def _beginnings(engine: Checkpointable) -> Iterator[tuple[str, Tensor]]:
    for buffer in flat_buffers(engine):
        if is_left_out(engine, buffer.params, True) and not isinstance(buffer.shard_storage, FileShardStorage):
            names, held = names_of(engine, buffer), buffer.owned(whole=not buffer.sharded, write=False)
            for fragment in buffer.layout.fragments(buffer.axis.rank, whole=not buffer.sharded):
                if fragment.start == 0 and fragment.numel >= _VALUES:
                    start = fragment.shard_start
                    yield names[fragment.slot.index], _plain(held[start : start + _VALUES])
    for name, param in loose_parameters(engine).items():
        if is_left_out(engine, [param], True) and param.numel() >= _VALUES:
            yield name, _plain(param.detach().flatten()[:_VALUES])


def _plain(values: Tensor) -> Tensor:
    return values.to("cpu", torch.float64) if values.is_floating_point() else values.to("cpu", torch.int64)


def tell_base(engine: Checkpointable, saved: Mapping[str, list[float]], excluded: frozenset[str]) -> None:
    """Say where frozen weights are not those of the run that was saved. On rank 0."""
    if not saved or not excluded:
        return
    here = {name: values.tolist() for name, values in _beginnings(engine) if name in excluded and name in saved}
    other = [name for name, values in here.items() if not _alike(values, saved[name])]
    if other:
        logger.warning(
            "the frozen weights are not those of the run that was saved, which no checkpoint has: %s begins with %s, "
            "and began with %s (%d of %d that were compared differ). What is loaded is another model: give the base as "
            "it was", other[0], here[other[0]], saved[other[0]], len(other), len(here),
        )  # fmt: skip


def _alike(values: list[Any], saved: list[Any]) -> bool:
    """In another dtype they are rounded; integers are packed, in an order that bitsandbytes changes as it computes."""
    if int in (type(values[0]), *map(type, saved)):
        return type(values[0]) is type(next(iter(saved), None))
    return all(math.isclose(a, b, rel_tol=0.01, abs_tol=1e-6) for a, b in zip(values, saved, strict=False))
