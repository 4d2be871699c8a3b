"""The batch triple: train_batch_size = micro-batch x accumulation steps x data-parallel world size.

One or two of the three follow from the rest, in DeepSpeed's order. A contradiction names the world size, where that
came from, and the consistent triples nearest to what was written.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from typing import Any

from ds_hf.config.source import Draft
from ds_hf.config.types.root import MeshShape, Origin, OriginKind

__all__ = ["KEYS", "WorldSize", "resolve_batch"]

KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_TOTAL, _MICRO, _STEPS = KEYS


@dataclass(frozen=True)
class WorldSize:
    """Number of data-parallel processes and where it is known from.

    Attributes:
        value: processes that read different samples; 0 when it is unknown.
        origin: where it is known from.
        mesh: in which they are not all processes.
    """

    value: int
    origin: str
    mesh: MeshShape | None = None

    @property
    def name(self) -> str:
        """What messages call it."""
        return "world size" if self.mesh is None else "data-parallel size"

    def divided(self, mesh: MeshShape | None) -> WorldSize:
        """Of ``value`` processes in a ``mesh``, those that read different samples."""
        if mesh is None or mesh.data == self.value:
            return self
        return replace(self, value=mesh.data, origin=f"{self.value} processes, {self.origin}, are {mesh}", mesh=mesh)

    @classmethod
    def find(cls, argument: int | None) -> WorldSize:
        """The argument, or the running process group, or the launcher's environment, or one process."""
        if argument is not None:
            return cls(argument, "given as world_size")
        return cls.launched() or cls(1, "no launcher: neither torch.distributed nor WORLD_SIZE is set")

    @classmethod
    def launched(cls) -> WorldSize | None:
        """The running process group, or the launcher's environment."""
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return cls(int(distributed.get_world_size()), "from torch.distributed, which is initialised")
        value = os.environ.get("WORLD_SIZE", "").strip()
        if value.isdecimal() and len(value) < 10 and int(value) > 0:
            return cls(int(value), "from the environment variable WORLD_SIZE")
        return None


def resolve_batch(draft: Draft, tree: dict[str, Any], world: WorldSize) -> None:
    """Fill in what is missing of the triple in ``draft.tree``, or collect the fault."""
    if any(draft.faulty(f"/{key}") for key in KEYS):
        return
    given = {key: tree[key] for key in KEYS if isinstance(tree.get(key), int)}
    open_keys = [key for key in KEYS if tree.get(key) == "auto"]
    if open_keys:
        return  # The Trainer completes them, and checks.
    if _TOTAL not in given and _MICRO not in given:
        message = "neither train_batch_size nor train_micro_batch_size_per_gpu is set"
        draft.fault(f"/{_TOTAL}", message, f'add "{_MICRO}": 1 (samples a process sends through the model at once)')
        return
    if world.value == 0:
        _check_possible(draft, given)
        return
    _correct_total(draft, given, world)
    total, micro, steps = _complete(given, world.value)
    if total == micro * steps * world.value and total > 0:
        for key, value in zip(KEYS, (total, micro, steps), strict=True):
            if key not in given:
                draft.tree[key] = value
                names = " and ".join(name for name in KEYS if name in given)
                draft.origins[f"/{key}"] = Origin(OriginKind.DERIVED, f"{names} with {world.name} {world.value}")
        return
    _contradiction(draft, given, world)


def _correct_total(draft: Draft, given: dict[str, int], world: WorldSize) -> None:
    """transformers and accelerate count processes that share samples when they fill ``train_batch_size``: such a total
    is derived anew, any other contradiction stays one."""
    total, micro, steps = (given.get(key, 0) for key in KEYS)
    mesh = world.mesh
    if mesh is None or total == (right := micro * steps * world.value):
        return
    counted = {micro * steps * mesh.processes, micro * steps * mesh.processes // mesh.sequence}
    if mesh.sequence > 1:
        counted.add(micro * steps)  # accelerate counts dp_shard_size alone, which is 1 unless it is given
    if micro and steps and total in counted:
        draft.tree[_TOTAL] = given[_TOTAL] = right
        counted_by = total // (micro * steps)
        some = "process, where" if counted_by == 1 else "processes, of which"
        message = f"it counts {counted_by} {some} {world.value} read different samples ({mesh})"
        draft.warn(f"/{_TOTAL}", message, f"{right} is used; set it to that, or leave it out")


def _complete(given: dict[str, int], world: int) -> tuple[int, int, int]:
    """DeepSpeed's derivation: two keys give the third, one alone goes with one accumulation step."""
    total, micro, steps = (given.get(key) for key in KEYS)
    if total is not None:
        if micro is None:
            steps = steps or 1
            micro = total // (world * steps)
        elif steps is None:
            steps = total // (world * micro)
        return total, micro, steps
    assert micro is not None
    steps = steps or 1
    return micro * steps * world, micro, steps


def _check_possible(draft: Draft, given: dict[str, int]) -> None:
    """Without a world size: is there any that fits?"""
    total = given.get(_TOTAL)
    rest = given.get(_MICRO, 1) * given.get(_STEPS, 1)
    if total is not None and total % rest:
        message = f"train_batch_size {total} is not a multiple of {_product(given)} = {rest}, so no world size fits"
        below = total // rest * rest
        choices = " or ".join(str(value) for value in (below, below + rest) if value)
        draft.fault(f"/{_TOTAL}", message, f"set train_batch_size to {choices}, or change the others")


def _product(given: dict[str, int]) -> str:
    names = {_MICRO: "train_micro_batch_size_per_gpu", _STEPS: "gradient_accumulation_steps"}
    return " x ".join(f"{name} {given[key]}" for key, name in names.items() if key in given)


def _contradiction(draft: Draft, given: dict[str, int], world: WorldSize) -> None:
    total = given[_TOTAL]
    size = world.value
    if _MICRO in given and _STEPS in given:
        product = given[_MICRO] * given[_STEPS] * size
        what = f"{_product(given)} x {world.name} {size} = {product}, but train_batch_size is {total}"
    else:
        rest = given.get(_MICRO, 1) * given.get(_STEPS, 1)
        parts = _product(given)
        by = f"{parts} x {world.name} {size} = {rest * size}" if parts else f"the {world.name} {size}"
        what = f"train_batch_size {total} is not divisible by {by}"
    lines = "".join(f"\n           {line}" for line in _nearby(given, size))
    message = f"{what} ({world.name} {size}: {world.origin})"
    draft.fault(
        f"/{_TOTAL}",
        message,
        f"use one of these (train_batch_size = micro-batch x accumulation x {world.name}):{lines}",
    )


def _nearby(given: dict[str, int], world: int) -> list[str]:
    """Consistent triples that change as little as possible of what was written."""
    total, micro, steps = given[_TOTAL], given.get(_MICRO), given.get(_STEPS)
    found: list[tuple[int, int, int]] = []
    if micro is not None and steps is not None:
        found.append((micro * steps * world, micro, steps))
    for multiple in _multiples(total, world):
        share = multiple // world
        if micro is not None:
            found += [(near, micro, near // (micro * world)) for near in _multiples(total, micro * world)]
        if steps is not None:
            found += [(near, near // (steps * world), steps) for near in _multiples(total, steps * world)]
        if micro is None and steps is None:
            found.append((multiple, share, 1))
    unique = list(dict.fromkeys(found))
    unique.sort(key=lambda triple: _distance(triple, given))
    return [f"{t} = {m} x {s} x {world}" for t, m, s in unique[:4]]


def _multiples(total: int, step: int) -> list[int]:
    below = total // step * step
    return [below] if below == total else [value for value in (below, below + step) if value > 0]


def _distance(triple: tuple[int, int, int], given: dict[str, int]) -> tuple[int, float]:
    changed = sum(key in given and given[key] != value for key, value in zip(KEYS, triple, strict=True))
    return changed, abs(triple[0] / given[_TOTAL] - 1)
