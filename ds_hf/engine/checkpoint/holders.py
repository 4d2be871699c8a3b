"""Which processes hold what, and which of them writes it.

A buffer's shards are divided over its axis. Where that is not all processes (model parallelism, sharding inside a host)
several axes may hold the same parameter, or the same slice of one: the first writes it. What is whole on every process
is written by the first that has it. Where all processes divide everything this is known without asking.

Outside checkpoints the first process puts a parameter together that is cut over processes: ``whole_value``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hf.checkpoint.boxes import cover_fault
from ds_hf.checkpoint.digest import digest_of, digests_of
from ds_hf.checkpoint.format import SavedCut, SavedFragment
from ds_hf.engine.checkpoint.agreement import collect
from ds_hf.engine.checkpoint.live import (
    Checkpointable,
    aliases,
    cut_in,
    flat_buffers,
    loose_parameters,
    module_buffers,
    names_of,
    world_of,
)
from ds_hf.engine.comm.mesh import Axis
from ds_hf.engine.zero.cut import Cut, cut_of
from ds_hf.engine.zero.model_parallel import check_copies
from ds_hf.errors import CheckpointError

__all__ = ["Holders", "find_holders", "whole_value"]

_Key = tuple[str, Any]  # name and cut


@dataclass(frozen=True)
class Holders:
    """What ``find_holders`` found.

    Attributes:
        world: all processes; those below are numbered along it.
        alike: all processes divide everything, and the tables are empty.
        divided: for each parameter or slice in flat buffers the first process of the first axis that holds it.
        whole: for what lies whole on its processes, the first of them.
        names: of all parameters and buffers that any process has, further names of tied ones among them.
        slices: for each parameter that is cut, its slices with the first process that has each.
        shapes: of the parameters that are cut, whole.
        own: buffers of modules that differ over the processes that share layers: each has built its own, as one that
            says where its part begins, so they are neither saved nor loaded.
    """

    world: Axis
    alike: bool
    divided: dict[_Key, int] = field(default_factory=dict)
    whole: dict[_Key, int] = field(default_factory=dict)
    names: frozenset[str] = frozenset()
    slices: dict[str, dict[SavedCut, int]] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    own: frozenset[str] = frozenset()

    @property
    def rank(self) -> int:
        """Of this process among all."""
        return self.world.rank

    def writes(self, axis: Axis, name: str, cut: SavedCut | None) -> bool:
        """Whether the processes of ``axis`` write their shards of a parameter or slice."""
        return self.alike or self.divided[name, cut] == _first_of(axis, self.world)

    def writes_whole(self, name: str, cut: SavedCut | None = None) -> bool:
        """Whether this process writes what it holds whole."""
        return self.rank == (0 if self.alike else self.whole[name, cut])

    def check(self, engine: Checkpointable, what: str) -> None:
        """Raise ``CheckpointError``, alike on all processes, where files would not hold the whole model."""
        self._check_slices()
        check_copies(engine.module, engine.mesh, what)

    def _check_slices(self) -> None:
        """Slices are each element of the whole once."""
        for name, slices in self.slices.items():
            whole = self.shapes[name]
            rows = [SavedFragment("", 0, 0, cut.numel(whole), cut) for cut in slices]
            if (name, None) in self.divided or (name, None) in self.whole:
                rows.append(SavedFragment("", 0, 0, math.prod(whole)))
            fault = cover_fault(whole, rows)
            if fault:
                raise CheckpointError(
                    f"the parts of {name} that the processes have {fault}: what model-parallel layers mark as their "
                    "place in the whole parameter (partition_dim, partition_stride) has to be right on each of them"
                )

    @property
    def lacking(self) -> bool:
        """Whether others have parameters or buffers that the first process has nothing of."""
        holders = [*self.divided.items(), *self.whole.items()]
        return {name for (name, _), rank in holders if rank == 0} != {name for (name, _), _ in holders}


def find_holders(engine: Checkpointable) -> Holders:
    """Ask all processes what they hold. Collective, unless all divide everything."""
    world = world_of(engine)
    if engine.axis.world_size == world.world_size and all(
        buffer.axis.world_size == world.world_size for buffer in flat_buffers(engine)
    ):
        return Holders(world, alike=True)
    table = _own_table(engine)
    digest = digest_of(table)
    digests = collect(world, digest)
    first = digests.index(digest) == world.rank  # tables that are alike are sent once
    tables = collect(world, table if first else None)
    names = frozenset(name for each in tables if each for name in each["names"])
    found = Holders(world, alike=False, names=names, own=_own_buffers(engine))
    for rank, each in enumerate(tables):
        for name, cut, leader in each["divided"] if each else ():
            key = name, _saved(cut)
            found.divided[key] = min(leader, found.divided.get(key, leader))
        for name, cut in each["whole"] if each else ():
            found.whole.setdefault((name, _saved(cut)), rank)
        for name, shape in each["shapes"].items() if each else ():
            if found.shapes.setdefault(name, tuple(shape)) != tuple(shape):
                raise CheckpointError(
                    f"the whole of {name} has shape {list(shape)} on process {rank} and {list(found.shapes[name])} on "
                    "another: each has a slice of the same parameter"
                )
    for (name, cut), rank in sorted({**found.whole, **found.divided}.items(), key=lambda item: item[1]):
        if cut is not None:
            found.slices.setdefault(name, {})[cut] = rank
    return found


def _first_of(axis: Axis, world: Axis) -> int:
    """The first process of ``axis``, numbered along ``world``."""
    return world.axis_rank(axis.global_rank(0))


def _own_buffers(engine: Checkpointable) -> frozenset[str]:
    """Names of the module's buffers that differ over the processes that share layers. Collective."""
    if engine.mesh.shape.tensor == 1:
        return frozenset()
    digests = digests_of(module_buffers(engine.module)[0])
    others = collect(engine.mesh.axis("tensor"), digests)
    here = {name for other in others for name in {**digests, **other} if digests.get(name) != other.get(name)}
    return frozenset(name for names in collect(world_of(engine), sorted(here)) for name in names)


def _own_table(engine: Checkpointable) -> dict[str, Any]:
    buffers, tied = module_buffers(engine.module)
    loose = loose_parameters(engine)
    divided = [
        (name, _plain(cut_in(param)), _first_of(buffer.axis, world_of(engine)))
        for buffer in flat_buffers(engine)
        for name, param in zip(names_of(engine, buffer), buffer.params, strict=True)
    ]
    whole = [*((name, _plain(cut_in(param))) for name, param in loose.items()), *((name, None) for name in buffers)]
    names = [*(name for name, *_ in divided), *loose, *buffers, *aliases(engine), *tied]
    params = {
        **loose,
        **{n: p for b in flat_buffers(engine) for n, p in zip(names_of(engine, b), b.params, strict=True)},
    }
    shapes = {name: tuple(cut.whole) for name, param in params.items() if (cut := cut_of(param)) is not None}
    return {"divided": divided, "whole": whole, "names": names, "shapes": shapes}


def _plain(cut: SavedCut | None) -> Any:
    return None if cut is None else (cut.dim, cut.ranges)


def _saved(cut: Any) -> SavedCut | None:
    return None if cut is None else SavedCut(*cut)


def whole_value(engine: Checkpointable, holders: Holders, name: str, param: Tensor) -> Tensor | None:
    """A gathered parameter of the live model, whole: on process 0, which the others send their slices to.

    All processes call it for the same parameters in the same order, after ``check``.

    Returns:
        ``None`` on other processes where the parameter is cut.
    """
    cut, own = cut_of(param), cut_in(param)
    if cut is None or own is None:
        return param.detach()
    world, slices = world_of(engine), holders.slices[name]
    if world.rank:
        if slices[own] == world.rank:
            dist.send(param.detach().contiguous(), world.global_rank(0), group=world.group)
        return None
    whole = torch.empty(cut.whole, dtype=param.dtype, device=param.device)
    for each, rank in slices.items():
        part = param.detach()
        if rank:
            part = torch.empty(each.shape(cut.whole), dtype=param.dtype, device=param.device)
            dist.recv(part, world.global_rank(rank), group=world.group)
        Cut(each.dim, each.ranges, cut.whole).put(whole, part.view(each.shape(cut.whole)))
    return whole
