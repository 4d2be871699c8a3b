"""Units: the parameters that are communicated together, the modules whose calls need them, and which is gathered ahead.

Invariant: each parameter of the model belongs to exactly one unit; inside a unit there is one flat buffer for each
(dtype, trainable, dtype of reductions) - parameter groups of the optimizer lie one after another in it - and every
buffer of a unit is gathered or none.

Gathered ahead is the next unit forwards and the one before in backward, in the order of the first step. That depends
only on the units that are used and on the order on which all ranks agreed, so ranks that use the same units issue the
same collectives. At most one unit beyond those in use is gathered, and none where that would exceed
``stage3_max_live_parameters``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from torch import nn

from ds_hf.engine.zero.buffer import FlatBuffer

__all__ = ["Prefetch", "Unit"]


@dataclass(eq=False)
class Unit:
    """Parameters that are gathered together.

    Attributes:
        name: path of the module in the model, ``""`` for the root.
        module: the module whose forward needs the unit.
        params: distinct parameters, in layout order.
        whole: small parameters of the whole model that stay gathered; only the root has some.
        owners: further modules that hold some of the parameters directly and may be called on their own.
        joined: further blocks of the unit, in the order of the model: as a rule they are called one after another.
        buffers: trainable and frozen flat buffers.
        leaf: ranks may use different parameters of it: it holds experts, or the user marked it as a leaf.
        depth: nested calls now in progress among ``modules``.
        awaited: calls since the last backward whose own backward will end; less than 0 when forwards ran inside it.
        open_calls: calls whose backward has begun and not ended.
        loading: ``load_state_dict`` of a module gathers the unit.
    """

    name: str
    module: nn.Module
    params: list[nn.Parameter]
    whole: list[nn.Parameter] = field(default_factory=list)
    owners: list[nn.Module] = field(default_factory=list)
    joined: list[nn.Module] = field(default_factory=list)
    buffers: list[FlatBuffer] = field(default_factory=list)
    leaf: bool = False
    depth: int = 0
    awaited: int = 0
    open_calls: set[Any] = field(default_factory=set)
    loading: bool = False

    @property
    def modules(self) -> list[nn.Module]:
        """Those whose calls need the unit."""
        return [self.module, *self.owners, *self.joined]

    @property
    def label(self) -> str:
        """For logs."""
        return f"{self.name} and {len(self.joined)} more" if self.joined else self.name

    @property
    def sharded(self) -> bool:
        return any(buffer.sharded for buffer in self.buffers)

    def gather(self) -> None:
        """Make the unit's parameters available. Collective when they are sharded."""
        for buffer in self.buffers:
            buffer.gather()

    def start_gather(self) -> bool:
        """Begin to make the unit's parameters available, unless they are. Collective when they are sharded."""
        began = [buffer.start_gather() for buffer in self.buffers]  # all of them
        return any(began)

    def release(self) -> None:
        """Give the gathered parameters' memory back."""
        for buffer in self.buffers:
            buffer.release()

    @property
    def numel(self) -> int:
        return sum(slot.numel for buffer in self.buffers for slot in buffer.layout.slots)


class Prefetch:
    """Gathers ahead once an order is known.

    Args:
        enabled: ``stage3_prefetch_bucket_size`` is not 0.
        max_live: elements that may be gathered at once (``stage3_max_live_parameters``).
    """

    def __init__(self, enabled: bool = True, max_live: int | None = None) -> None:
        self.enabled = enabled
        self.max_live = max_live
        self.last: Unit | None = None  # backward begins with it: not worth releasing before
        self._next: dict[Unit, Unit] = {}
        self._before: dict[Unit, Unit] = {}
        self._ahead: set[Unit] = set()

    def follow(self, units: Sequence[Unit]) -> None:
        """The units are used in this order in a forward."""
        sharded = [unit for unit in units if unit.sharded and unit.name]
        self.last = sharded[-1] if sharded else None
        if not self.enabled:
            return
        pairs = [(a, b) for a, b in pairwise(sharded) if self._fits(a, b)]
        self._next = dict(pairs)
        self._before = {b: a for a, b in pairs}
        if sharded and units[0] is not sharded[0]:
            self._next[units[0]] = sharded[0]  # the root comes first

    def _fits(self, a: Unit, b: Unit) -> bool:
        return self.max_live is None or a.numel + b.numel <= self.max_live

    def forward(self, unit: Unit) -> None:
        """``unit`` has been gathered for its forward."""
        self._start(unit, self._next.get(unit))

    def backward(self, unit: Unit) -> None:
        """``unit`` has been gathered for its backward."""
        self._start(unit, self._before.get(unit))

    def _start(self, unit: Unit, other: Unit | None) -> None:
        self._ahead.discard(unit)
        if other is not None and other.start_gather():
            self._ahead.add(other)

    def drop(self) -> None:
        """A forward without backward, or a backward, is over: give back what was gathered and not used."""
        while self._ahead:
            unit = self._ahead.pop()
            if not unit.depth:
                unit.release()
