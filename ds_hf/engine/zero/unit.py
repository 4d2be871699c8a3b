"""Units: the parameters that are communicated together, and the modules whose calls need them.

Invariant: each parameter of the model belongs to exactly one unit; inside a unit there is one flat buffer for each
(dtype, trainable, dtype of reductions) - parameter groups of the optimizer lie one after another in it - and every
buffer of a unit is gathered or none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ds_hf.engine.zero.buffer import FlatBuffer

__all__ = ["Unit"]


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
