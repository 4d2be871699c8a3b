"""In place of a GPU: numbers whose copies on the host arrive when a test says so. Scripts import it fast."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ds_hf.engine.observe.monitor import feed, master
from ds_hf.engine.observe.monitor.late import LateCopy
from ds_hf.engine.optim.sharded import ShardedOptimizer


class Slow(LateCopy):
    """A copy from a device that answers when it is told to; the number is the one at the time of the copy."""

    made: list[Slow]

    def __init__(self, value: Tensor) -> None:
        self._number, self.arrived = value.detach().clone(), False
        Slow.made.append(self)

    @property
    def ready(self) -> bool:
        return self.arrived

    def item(self) -> Any:
        self.arrived = True
        return self._number.item()


def slow(value: Any) -> Any:
    """In place of ``later``: every tensor lies on a slow device."""
    return Slow(value) if isinstance(value, Tensor) else value


def become_slow() -> None:
    """In this process every tensor lies on a slow device, and what became of a step is asked for later."""
    Slow.made = []
    for module in (feed, master):
        module.later = slow  # type: ignore[attr-defined]
    for name in ("_decides_later", "learns_later"):
        setattr(ShardedOptimizer, name, property(lambda self: True))
