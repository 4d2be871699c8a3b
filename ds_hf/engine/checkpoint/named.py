"""Whole weights of a live engine by name, on every rank, one unit at a time: what another program loads (vLLM)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ds_hf.engine.checkpoint.agreement import collect
from ds_hf.engine.checkpoint.holders import find_holders
from ds_hf.engine.checkpoint.interface import (
    Checkpointable,
    aliases,
    loose_parameters,
    module_buffers,
    names_of,
)
from ds_hf.engine.comm import collectives
from ds_hf.engine.comm.mesh import Axis
from ds_hf.engine.zero.buffer import unshard
from ds_hf.engine.zero.cut import Cut, cut_of

__all__ = ["named_weights"]


def named_weights(engine: Checkpointable, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers of this rank's layers, whole, by every name that the model has for them.

    All ranks run through it together. A flat buffer is gathered in one collective, and in another where tensor
    parallelism has cut it.

    Args:
        dtype: of floating-point weights; default what each has in the model.
    """
    axis = engine.mesh.axis("tensor") if engine.mesh.shape.tensor > 1 else None
    own = find_holders(engine).own
    further: dict[str, list[str]] = {}
    for alias, name in {**aliases(engine), **module_buffers(engine.module)[1]}.items():
        further.setdefault(name, []).append(alias)

    def every_name(name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
        value = value.detach()
        if dtype is not None and value.is_floating_point():
            value = value.to(dtype)
        for each in (name, *further.get(name, ())):
            yield each, value

    for unit in engine.units:
        for buffer in unit.buffers:
            names, params = names_of(engine, buffer), buffer.params
            with unshard([buffer] if buffer.sharded else []):
                if not buffer.sharded:
                    buffer.gather()
                for name, value in zip(names, _whole(params, axis, buffer.labels.weights), strict=True):
                    yield from every_name(name, value)
    rest = {**loose_parameters(engine), **module_buffers(engine.module)[0]}
    rest = {name: value for name, value in rest.items() if name not in own}
    for name, value in zip(rest, _whole(list(rest.values()), axis, "weights that are in no unit"), strict=True):
        yield from every_name(name, value)


@torch.no_grad()
def _whole(params: Sequence[Tensor], axis: Axis | None, what: str) -> list[Tensor]:
    """``params`` without cuts; those that have one are put together from the slices of all ranks of ``axis``."""
    cuts = [cut_of(param) for param in params]
    values = [param.detach() for param in params]
    cut = [index for index, each in enumerate(cuts) if each is not None]
    if axis is None or not cut:
        return values
    for dtype in dict.fromkeys(values[index].dtype for index in cut):
        chosen = [index for index in cut if values[index].dtype == dtype]
        for index, value in zip(chosen, _put_together(values, cuts, chosen, axis, what), strict=True):
            values[index] = value
    return values


def _put_together(
    values: Sequence[Tensor], cuts: Sequence[Cut | None], chosen: Sequence[int], axis: Axis, what: str
) -> Iterator[Tensor]:
    """The whole of each of ``chosen``, all of which travel in one gather."""
    mine = torch.cat([values[index].reshape(-1) for index in chosen])
    told = [(cut.dim, cut.ranges) for index in chosen if (cut := cuts[index]) is not None]
    tables = collect(axis, (told, mine.numel()))
    longest = max(numel for _, numel in tables)  # heads that do not divide
    gathered = mine.new_empty(axis.world_size * longest)
    collectives.all_gather(gathered, torch.nn.functional.pad(mine, (0, longest - mine.numel())), axis, what)
    parts = gathered.view(axis.world_size, longest)
    place = [0] * axis.world_size
    for position, index in enumerate(chosen):
        own = cuts[index]
        assert own is not None
        whole = torch.empty(own.whole, dtype=mine.dtype, device=mine.device)
        for rank, (table, _) in enumerate(tables):
            cut = Cut(*table[position], own.whole)
            numel = cut.shape.numel()
            cut.put(whole, parts[rank, place[rank] : place[rank] + numel].view(cut.shape))
            place[rank] += numel
        yield whole
