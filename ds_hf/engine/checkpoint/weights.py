"""Whole weights of a live engine: those that other stages of a pipeline hold, and all of them by name on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hf.checkpoint.format import SavedCut
from ds_hf.engine.checkpoint.agreement import collect
from ds_hf.engine.checkpoint.holders import Holders, find_holders
from ds_hf.engine.checkpoint.live import (
    Checkpointable,
    aliases,
    cut_in,
    flat_buffers,
    loose_parameters,
    module_buffers,
    names_now,
    names_of,
    parameter_name,
    world_of,
)
from ds_hf.engine.checkpoint.merging import Merging
from ds_hf.engine.comm import collectives
from ds_hf.engine.comm.mesh import Axis, compute_device
from ds_hf.engine.modules.quantized.layers import values_of_blocks
from ds_hf.engine.zero.buffer import home_of, logical_shape, own_dtype, unshard
from ds_hf.engine.zero.cut import Cut, cut_of, whole_shape
from ds_hf.engine.zero.packed import tell_quantized_elsewhere
from ds_hf.errors import CheckpointError

__all__ = ["Remote", "Stages", "find_whole", "named_weights", "values_of"]

# -- what other stages or processes with other experts hold, brought to process 0 one tensor at a time -----------------


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
    """What is on which stage.

    Attributes:
        here: this process is in the first stage, whose parameters process 0 puts together itself.
        remote: what others hold, and process 0 nothing of, in the order of the processes.
        tied: further names of it.
    """

    here: bool
    remote: list[Remote]
    tied: dict[str, str]


def find_whole(engine: Checkpointable, doing: str) -> tuple[Holders, Stages]:
    """Who holds what, for whole weights on process 0. Collective.

    Raises:
        CheckpointError: on all processes: ``doing`` needs what cannot be put together there.
    """
    holders = find_holders(engine)
    holders.check(engine, doing)
    return holders, _find_stages(engine, holders)


def _find_stages(engine: Checkpointable, holders: Holders) -> Stages:
    """Ask the others what they hold that process 0 does not. Collective where there is any."""
    if engine.mesh.shape.pipe == 1 and not holders.lacking:
        return Stages(True, [], {})
    world, own = world_of(engine), _own(engine)
    table = [(name, tuple(whole_shape(t, logical_shape(t))), own_dtype(t), t.requires_grad) for name, t in own.items()]
    further = {**aliases(engine), **module_buffers(engine.module)[1]}
    tells = engine.mesh.shape.pipe == 1 or engine.mesh.replicas.rank == 0  # replicas may have other experts
    answers = collect(world, (table if tells else [], further))
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
    opened, open_now = contextlib.ExitStack(), None
    for remote in filter(wanted, stages.remote):
        if world.rank:
            param = own.get(remote.name)
            home = None if param is None else home_of(param)
            if home is not None and home.buffer.sharded and home.buffer is not open_now:
                opened.close()
                open_now = home.buffer
                opened.enter_context(unshard([open_now]))
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
    opened.close()


# -- by name, one unit at a time: what another program loads (vLLM) ----------------------------------------------------


def named_weights(
    engine: Checkpointable, dtype: torch.dtype | None = None, *, merged: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers of this rank's layers, whole, by every name that the model has for them.

    All ranks run through it together. A flat buffer is gathered in one collective, and in another where tensor
    parallelism has cut it.

    Args:
        dtype: of floating-point weights; default what each has in the model.
        merged: as they are without PEFT's adapters, the active ones added to their weights.

    Raises:
        CheckpointError: processes have modules that others do not have, which are not sent; or see ``Merging``.
    """
    axis = engine.mesh.axis("tensor") if engine.mesh.shape.tensor > 1 else None
    holders = find_holders(engine)
    own = holders.own
    if holders.lacking and engine.mesh.shape.pipe == 1:
        raise CheckpointError(
            "weights cannot be told by name on every process: each has experts of its own as modules; "
            "save_16bit_model() and save_checkpoint() write the whole model"
        )
    further: dict[str, list[str]] = {}
    now = names_now(engine)  # without those that left the model
    for alias, name in {**aliases(engine, now), **module_buffers(engine.module)[1]}.items():
        further.setdefault(name, []).append(alias)

    tell_quantized_elsewhere(engine.module)
    readable = values_of_blocks(engine.module)
    merging = Merging(engine.module) if merged else None

    def put_together(named: Mapping[str, Tensor], what: str) -> Iterator[tuple[str, Tensor]]:
        """What ``named`` stands for, whole, by every name. Values of adapters have to be here."""
        items: list[tuple[list[str], Tensor, Tensor, bool]] = []
        for name, param in named.items():
            aliases_of = (name, *further.get(name, ()))
            adapted = [alias for alias in aliases_of if merging is not None and merging.changes(alias)]
            plain = [alias for alias in aliases_of if alias not in adapted]
            targets = plain if merging is None else [each for each in map(merging.name_of, plain) if each is not None]
            if targets:
                items.append((targets, param, param.detach(), True))
            for alias in adapted:
                assert merging is not None
                items.append(([merging.name_of(alias) or alias], param, with_adapters(merging, alias, param), False))
        values = _whole([param for _, param, *_ in items], [value for _, _, value, _ in items], axis, what)
        for (targets, param, _, packed), value in zip(items, values, strict=True):
            value = readable(param, value) if packed else value
            if dtype is not None and value.is_floating_point():
                value = value.to(dtype)
            for each in targets:
                yield each, value

    def with_adapters(merging: Merging, name: str, param: Tensor) -> Tensor:
        value = readable(param, param.detach()) if cut_of(param) is None else param.detach()
        return merging.merged(name, value if dtype is None or not value.is_floating_point() else value.to(dtype))

    held = () if merging is None else [buffer for buffer in flat_buffers(engine) if merging.has_adapters(buffer.params)]
    for buffer in held:
        buffer.gather()
    with unshard([buffer for buffer in held if buffer.sharded]):
        for unit in engine.units:
            for buffer in unit.buffers:
                left = {id(owner) for owner in buffer.owners} - now.keys()
                stay = [param for param in buffer.params if id(param) not in left]
                named = {now.get(id(param)) or parameter_name(engine, param): param for param in stay}
                with unshard([buffer] if buffer.sharded else []):
                    if not buffer.sharded:
                        buffer.gather()
                    yield from put_together(named, buffer.labels.weights)
        rest = {**loose_parameters(engine), **module_buffers(engine.module)[0]}
        rest = {name: value for name, value in rest.items() if name not in own}
        yield from put_together(rest, "weights that are in no unit")


@torch.no_grad()
def _whole(params: Sequence[Tensor], values: list[Tensor], tensor: Axis | None, what: str) -> list[Tensor]:
    """``values`` of ``params`` without cuts; those that have one are put together from the slices of all that divide
    them."""
    cuts = [cut_of(param) for param in params]
    values = list(values)
    kinds: dict[tuple[torch.dtype, Axis | None], list[int]] = {}
    for index, param in enumerate(params):
        if cuts[index] is not None:
            divided = getattr(param, "_ds_divided", None)  # by the engine; else by the model's author
            kinds.setdefault((param.dtype, tensor if divided is None else divided.axis), []).append(index)
    for (_, axis), chosen in kinds.items():
        if axis is None:
            continue
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
