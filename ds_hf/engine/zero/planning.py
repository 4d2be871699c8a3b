"""Which parameters are communicated together, and in which flat buffers they will lie.

``plan_units`` answers both and changes nothing: the engine is built from its answer, and ``memory`` predicts with it.
Units are repeated blocks, small ones of them several together, large leaves alone, the rest with the root. Inside a
unit the parameters that are alike share a flat buffer.

Invariant: inside a module of which ranks may call different children (experts) there is no unit, for a gather that
some ranks do not join never ends. A pure function of the module tree: every rank gets the same units in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ds_hf.engine.zero.buffer import logical_shape, own_dtype
from ds_hf.engine.zero.comm_dtype import COMM_DTYPE
from ds_hf.engine.zero.leaf import find_choices, holder_of, is_container, is_leaf
from ds_hf.engine.zero.packed import is_packed
from ds_hf.engine.zero.replicas import Replicas
from ds_hf.engine.zero.unit import Unit
from ds_hf.log import warn_once

__all__ = [
    "FROZEN",
    "LARGE_LEAF_NUMEL",
    "BufferSpec",
    "UnitPolicy",
    "find_blocks",
    "join_small",
    "keep_small_whole",
    "make_units",
    "plan_buffers",
    "plan_units",
    "tell_common_memory",
    "tell_lost_format",
]

FROZEN = -1  # group index of parameters that no optimizer updates

LARGE_LEAF_NUMEL = 1 << 20  # elements; smaller leaves travel with the root, where their latency is shared
JOINED_NBYTES = 80 << 20  # of a unit of several blocks, at most: 0.3 ms of NVLink, of which a unit costs the host more
_LEAST_UNITS = 4  # that blocks are joined to, for some to be on their way while others compute


@dataclass(frozen=True)
class UnitPolicy:
    """What of a plan and a configuration decides the units and their buffers.

    Attributes:
        sharded: each rank keeps its shard of the parameters between uses ...
        whole_below, whole_in_all: ... but for small ones, see ``StatePlan``.
        joins: small neighbouring blocks are one unit (``join_small``).
        max_live: elements that may be gathered at once, ``None`` for any number.
        dtype: of all parameters, ``None`` for their own.
        sent: in which gradients are reduced, ``None`` for the parameters' dtype; a parameter's ``comm_dtype`` wins.
    """

    sharded: bool
    whole_below: int = 0
    whole_in_all: int = 0
    joins: bool = False
    max_live: int | None = None
    dtype: torch.dtype | None = None
    sent: torch.dtype | None = None


@dataclass(frozen=True, eq=False)
class BufferSpec:
    """A flat buffer that is to be made: the parameters of a unit that are alike.

    Attributes:
        unit: name of the unit.
        shapes: of the whole parameters, in layout order.
        dtype: in which their values are kept; of packed ones their own.
        trains: gets gradients and optimizer states.
        sharded: each rank keeps its shard between uses.
        packed: quantized parameters, kept as bytes.
        spares_host: of joined blocks, where launches count and not bytes: nothing of it goes by copies between GPUs.
        params: in layout order; parameter groups of the optimizer lie one after another.
        groups: of each parameter, ``FROZEN`` where none updates it.
        replicas: of all of them; only predictions do without.
    """

    unit: str
    shapes: tuple[torch.Size, ...]
    dtype: torch.dtype
    trains: bool
    sharded: bool
    packed: bool = False
    spares_host: bool = False
    params: tuple[nn.Parameter, ...] = ()
    groups: tuple[int, ...] = ()
    replicas: Replicas | None = None

    @property
    def numel(self) -> int:
        """Of the parameters, without padding."""
        return sum(shape.numel() for shape in self.shapes)

    @property
    def label(self) -> str:
        """What logs call the buffer where its unit may have another name in other stages of a pipeline."""
        return "" if self.replicas is None else self.replicas.tied

    @property
    def itemsize(self) -> int:
        """Bytes an element."""
        return self.dtype.itemsize


def plan_units(
    model: nn.Module,
    params: Iterable[nn.Parameter] | None,
    policy: UnitPolicy,
    group_of: Mapping[int, int],
    replicas_of: Callable[[nn.Parameter], Replicas],
    elsewhere: Collection[int] = (),
) -> dict[Unit, list[BufferSpec]]:
    """The units of ``model``, the root first, and the flat buffers that each is to have, in the order of the engine.

    Args:
        params: those that lie in flat buffers, ``None`` for all floating-point ones.
        group_of: id of each trained parameter -> its group of the optimizer.
        replicas_of: the replicas of a parameter.
        elsewhere: ids of parameters that stay in buffers that there are.
    """
    units = make_units(model, params)
    if policy.joins:
        units = join_small(units, policy.dtype, policy.max_live)
    if policy.sharded:
        units = keep_small_whole(units, policy.whole_below, policy.whole_in_all, elsewhere)
    return {
        unit: [
            spec
            for params, whole in ((unit.params, False), (unit.whole, True))
            for here in [[param for param in params if id(param) not in elsewhere]]
            for spec in plan_buffers(unit, here, policy, group_of, replicas_of, whole=whole)
        ]
        for unit in units
    }


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The outermost repeated blocks: what the model itself calls unsplittable, else alike children of a list."""
    named = dict(model.named_modules())
    declared = {
        class_name
        for module in named.values()
        for class_name in (getattr(module, "_no_split_modules", None) or ())
        if isinstance(class_name, str)
    }
    chosen = {name for name, module in named.items() if type(module).__name__ in declared}
    leaves = {name for name, module in named.items() if is_leaf(module)}
    # a list that was marked as a leaf is never called: who holds it is, and gathers it
    chosen |= {holder_of(named, name) if is_container(named[name]) else name for name in leaves}
    if is_leaf(model):
        return []
    choices = find_choices(model)
    chosen |= {choice.holder for choice in choices}
    chosen |= {
        f"{name}.{child}" if name else child
        for name, module in named.items()
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1 and _alike(module.children())
        for child, item in module.named_children()
        if not is_container(item)
    }
    # where the model itself chooses, its experts travel with the root
    inside = chosen | leaves | {choice.container for choice in choices}
    outermost = [name for name in chosen if name and not any(parent in inside for parent in _ancestors(name))]
    order = {name: position for position, name in enumerate(named)}
    return [
        (name, named[name])
        for name in sorted(outermost, key=order.__getitem__)
        if any(True for _ in named[name].parameters())
    ]


def make_units(model: nn.Module, params: Iterable[nn.Parameter] | None = None) -> list[Unit]:
    """Split the floating-point parameters of ``model`` (or the given ones) into units, the root first.

    A parameter reached from several units (tied weights) is stored once, with their lowest common ancestor: the root.
    """
    wanted = {id(p) for p in params or model.parameters() if params is not None or p.is_floating_point()}
    claims: dict[int, set[str]] = {}
    blocks = find_blocks(model)
    inner = {name: {id(p) for p in block.parameters()} for name, block in blocks}
    choices = find_choices(model)
    closed = {name for name, _ in blocks} | {choice.container for choice in choices}
    leaves = [
        (name, module)
        for name, module in model.named_modules()
        if name
        and not any(part in closed for part in (name, *_ancestors(name)))
        and sum(logical_shape(p).numel() for p in module.parameters(recurse=False)) >= LARGE_LEAF_NUMEL
        and not any(True for _ in module.children())
    ]
    inner |= {name: {id(p) for p in leaf.parameters()} for name, leaf in leaves}
    for name, ids in inner.items():
        for key in ids:
            claims.setdefault(key, set()).add(name)
    outside = _used_outside(model, set(inner))
    root = Unit("", model, [])
    chooses = {parent for choice in choices for parent in (choice.holder, *_ancestors(choice.holder))}
    units = {
        name: Unit(name, module, [], leaf=name in chooses or any(map(is_leaf, module.modules())))
        for name, module in [*blocks, *leaves]
    }
    for param in dict.fromkeys(p for p in model.parameters() if id(p) in wanted):
        owners = claims.get(id(param), set())
        home = units[next(iter(owners))] if len(owners) == 1 and id(param) not in outside else root
        home.params.append(param)
    rest = {id(p) for p in root.params}
    root.owners = [m for m in model.modules() if m is not model and any(id(p) in rest for p in m._parameters.values())]
    order = {name: position for position, (name, _) in enumerate(model.named_modules())}
    ordered = sorted(units.values(), key=lambda unit: order[unit.name])
    # the root also without parameters: its outputs are where a backward begins
    return [root, *(unit for unit in ordered if unit.params)]


def join_small(units: list[Unit], dtype: torch.dtype | None, max_live: int | None = None) -> list[Unit]:
    """Make one unit of several neighbouring blocks of one class where each is small: then a step takes as long as the
    host needs for what it does around units.

    Args:
        dtype: of all parameters, ``None`` for their own.
        max_live: elements that may be gathered at once: two units, for one is gathered ahead.
    """
    found: list[Unit] = []
    for run in _runs(units):
        nbytes, numels = 0, []
        for unit in run:
            numels.append(sum(logical_shape(param).numel() for param in unit.params))
            nbytes = max(nbytes, sum(logical_shape(p).numel() * (dtype or own_dtype(p)).itemsize for p in unit.params))
        together = min(JOINED_NBYTES // max(nbytes, 1), len(run) // _LEAST_UNITS)
        if max_live is not None:
            together = min(together, max_live // 2 // max(*numels, 1))
        together = max(together, 1)
        for start in range(0, len(run), together):
            first, *others = run[start : start + together]
            for unit in others:
                first.joined.append(unit.module)
                first.params += unit.params
            found.append(first)
    return found


def _runs(units: list[Unit]) -> list[list[Unit]]:
    """``units``, those that may be joined with their neighbours together."""
    runs: list[list[Unit]] = []
    for unit in units:
        parent = unit.name.rpartition(".")[0]
        if runs and (last := runs[-1][-1]).name and not (unit.leaf or last.leaf):
            alike = type(unit.module) is type(last.module) and last.name.rpartition(".")[0] == parent
            if alike and any(True for _ in unit.module.children()):
                runs[-1].append(unit)
                continue
        runs.append([unit])
    return runs


def keep_small_whole(units: list[Unit], below: int, in_all: int, but: Collection[int] = ()) -> list[Unit]:
    """Move parameters of fewer than ``below`` elements, other than ``but``, to the root's ``whole``, at most ``in_all``
    elements together.

    DeepSpeed: ``stage3_param_persistence_threshold``, ``stage3_model_persistence_threshold``. All of them are one
    buffer of the root: one more reduction a backward and one more gather a step, however many there are.
    """
    room = in_all
    for unit in units if below else ():
        kept: list[nn.Parameter] = []
        for param in unit.params:
            numel = logical_shape(param).numel()
            small = numel < below and numel <= room and param.is_floating_point() and id(param) not in but
            room -= numel if small else 0
            (units[0].whole if small else kept).append(param)
        unit.params = kept
    return [units[0], *(unit for unit in units[1:] if unit.params)]


def plan_buffers(
    unit: Unit,
    params: Iterable[nn.Parameter],
    policy: UnitPolicy,
    group_of: Mapping[int, int],
    replicas_of: Callable[[nn.Parameter], Replicas],
    *,
    whole: bool,
) -> list[BufferSpec]:
    """Flat buffers for ``params``, one for each (replicas, dtype or packed, dtype of reductions if trained).

    Args:
        params: of ``unit`` ...
        whole: ... among those that stay gathered, otherwise among the others.
    """
    specs = []
    found: dict[tuple[Replicas, Any, torch.dtype | None], list[nn.Parameter]] = {}
    for param in params:
        own = policy.dtype or own_dtype(param)
        trains = group_of.get(id(param), FROZEN) != FROZEN
        reduced = getattr(param, COMM_DTYPE, policy.sent or own) if trains else None
        key = (replicas_of(param), "bytes" if is_packed(param) else own, reduced)
        found.setdefault(key, []).append(param)
    for (replicas, _, _), alike in found.items():
        ordered = sorted(alike, key=lambda p: group_of.get(id(p), FROZEN))
        specs.append(
            BufferSpec(
                unit.name,
                tuple(logical_shape(param) for param in ordered),
                policy.dtype or own_dtype(ordered[0]),
                trains=group_of.get(id(ordered[0]), FROZEN) != FROZEN,
                sharded=policy.sharded and not whole,
                packed=is_packed(ordered[0]),
                spares_host=bool(unit.joined),
                params=tuple(ordered),
                groups=tuple(group_of.get(id(param), FROZEN) for param in ordered),
                replicas=replicas,
            )
        )
    return specs


def _used_outside(model: nn.Module, inner: set[str]) -> set[int]:
    """Parameters held by a module that is inside none of the named units (tied to one that is)."""
    found: set[int] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        if name in inner or any(parent in inner for parent in _ancestors(name)):
            continue
        found |= {id(p) for p in module._parameters.values() if p is not None}
    return found


_TIED_BY_PEFT = (
    ". PEFT's ensure_weight_tying has made these, and ties them again when the saved adapter is loaded, which is then "
    "another model than the one that was trained: leave it out, and name both layers in target_modules"
)


def tell_lost_format(model: nn.Module) -> None:
    """Warn of weights of convolutions in ``channels_last``: a flat buffer holds them as contiguous ones, with the same
    values."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    lost = [
        name
        for name, param in model.named_parameters()
        if type(param) is nn.Parameter
        and (form := formats.get(param.dim())) is not None
        and param.is_contiguous(memory_format=form)
        and not param.is_contiguous()
    ]
    if lost:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        warn_once(
            f"{lost[0]}{more} do not keep their memory format channels_last in the engine: numbers stay the same, and "
            "convolutions go on to compute in it where the model's inputs have it: images = "
            "images.to(memory_format=torch.channels_last) before each call"
        )


def tell_common_memory(model: nn.Module) -> None:
    """Warn of parameters and buffers that lie where a parameter that trains lies.

    ``a.weight.data = b.weight.data`` makes such ones. Alone they change together; in flat buffers each has a place of
    its own.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    stretches = sorted(
        (tensor.untyped_storage().data_ptr(), tensor.data_ptr(), number)
        for number, (_, tensor) in enumerate(tensors)
        if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.device.type != "meta" and tensor.numel()
    )
    before, end = None, 0
    for _, start, number in stretches:
        name, tensor = tensors[number]
        if before is not None and start < end and (tensor.requires_grad or before[1].requires_grad):
            (one, other), what = sorted((before[0], name)), "are two parameters"
            if not isinstance(tensor, nn.Parameter) or not isinstance(before[1], nn.Parameter):
                what = "are a parameter and a buffer"
            warn_once(
                f"{one} and {other} {what} in the same memory, and no longer change together (said once, for the "
                "first of them): the engine gives each its own place, with the values of now. To tie them, make them "
                "one parameter (as in head.weight = embedding.weight); where each is meant to be by itself, begin with "
                f"a copy (.clone()){_TIED_BY_PEFT if 'lora_' in one and 'lora_' in other else ''}"
            )
            return
        if start + _extent(tensor) > end:
            before, end = (name, tensor), start + _extent(tensor)


def _extent(tensor: torch.Tensor) -> int:
    """In bytes; of one whose elements lie apart, the first of them, for others may lie between."""
    return tensor.nbytes if tensor.is_contiguous() else tensor.element_size()


def _ancestors(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _alike(children: Iterable[nn.Module]) -> bool:
    """All of one class, and each with parameters."""
    listed = list(children)
    return len({type(child) for child in listed}) == 1 and all(any(True for _ in c.parameters()) for c in listed)
