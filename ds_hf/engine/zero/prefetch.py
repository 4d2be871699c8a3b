"""Which unit is gathered ahead: the next one forwards, the one before in backward, in the order of the first step.

Invariant: what is gathered ahead depends only on the units that are used and on the order on which all ranks agreed,
so ranks that use the same units issue the same collectives. At most one unit beyond those in use is gathered, and none
where that would exceed ``stage3_max_live_parameters``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ds_hf.engine.zero.unit import Unit

__all__ = ["Prefetch"]


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
