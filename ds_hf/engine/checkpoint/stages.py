"""What other stages of a pipeline hold, brought to process 0 one tensor at a time, for state dicts and exports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hf.checkpoint.zero_to_fp32 import SavedCut
from ds_hf.engine.checkpoint.agreement import collect
from ds_hf.engine.checkpoint.holders import Holders
from ds_hf.engine.checkpoint.interface import (
    Checkpointable,
    aliases,
    cut_in,
    flat_buffers,
    loose_parameters,
    module_buffers,
    names_of,
    world_of,
)
from ds_hf.engine.comm.mesh import compute_device
from ds_hf.engine.zero.cut import Cut, whole_shape

__all__ = ["Remote", "Stages", "find_stages", "values_of"]


class Remote(NamedTuple):
    """A parameter or buffer that process 0 does not hold.

    Attributes:
        shape: of the whole.
        holders: who sends it, or each slice of it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trains: bool
    holders: dict[SavedCut | None, int]


class Stages(NamedTuple):
    """What ``find_stages`` found.

    Attributes:
        here: this process is in the first stage, whose parameters process 0 puts together itself.
        remote: what the others hold, in the order of the stages.
        tied: further names of it.
    """

    here: bool
    remote: list[Remote]
    tied: dict[str, str]


def find_stages(engine: Checkpointable, holders: Holders) -> Stages:
    """Ask the other stages what they hold. Collective where there are any."""
    if engine.mesh.shape.pipe == 1:
        return Stages(True, [], {})
    world, own = world_of(engine), _own(engine)
    table = [(name, tuple(whole_shape(t, t.shape)), t.dtype, t.requires_grad) for name, t in own.items()]
    further = {**aliases(engine), **module_buffers(engine.module)[1]}
    answers = collect(world, (table if engine.mesh.replicas.rank == 0 else [], further))
    senders: dict[str, dict[SavedCut | None, int]] = {}
    for (name, cut), rank in {**holders.whole, **holders.divided}.items():
        senders.setdefault(name, {})[cut] = rank
    first = {name for name, *_ in answers[0][0]}
    remote = {
        name: Remote(name, shape, dtype, trains, senders[name])
        for each, _ in answers
        for name, shape, dtype, trains in each
        if name not in first and name not in holders.own
    }
    tied = {alias: name for _, each in answers for alias, name in each.items()}
    return Stages(engine.mesh.stage_rank == 0, list(remote.values()), tied)


def _own(engine: Checkpointable) -> dict[str, Tensor]:
    """Parameters and persistent buffers of this process by name, in the order of its stage."""
    found: dict[str, Tensor] = {}
    for buffer in flat_buffers(engine):
        found.update(zip(names_of(engine, buffer), buffer.owners, strict=True))
    return {**found, **loose_parameters(engine), **module_buffers(engine.module)[0]}


def values_of(
    engine: Checkpointable, stages: Stages, wanted: Callable[[Remote], bool] = lambda remote: True
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of ``stages.remote`` by name, whole: on process 0, and nothing elsewhere. All processes exhaust it.

    Args:
        wanted: alike on all processes.
    """
    world, device = world_of(engine), compute_device()
    own: dict[str, Any] = _own(engine) if stages.remote else {}
    for remote in filter(wanted, stages.remote):
        if world.rank:
            param = own.get(remote.name)
            if param is not None and remote.holders.get(cut_in(param)) == world.rank:
                dist.send(param.detach().to(device).contiguous(), world.global_rank(0), group=world.group)
            continue
        whole = torch.empty(remote.shape, dtype=remote.dtype, device=device)
        for cut, rank in remote.holders.items():
            part = whole if cut is None else torch.empty(cut.shape(remote.shape), dtype=remote.dtype, device=device)
            dist.recv(part, world.global_rank(rank), group=world.group)
            if cut is not None:
                Cut(cut.dim, cut.ranges, torch.Size(remote.shape)).put(whole, part.view(cut.shape(remote.shape)))
        yield remote.name, whole
