"""Which micro-batch is the boundary: the last one before an optimizer step.

Invariant: a value forced by ``set_gradient_accumulation_boundary`` holds until it is set again; without one the
boundary is every ``steps``-th call of ``Engine.step``.
"""

from __future__ import annotations

__all__ = ["Accumulation"]


class Accumulation:
    """Counts micro-batches.

    Attributes:
        steps: micro-batches per optimizer step (``gradient_accumulation_steps``).
        micro_steps: micro-batches finished since the start.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.micro_steps = 0
        self.forced: bool | None = None

    @property
    def at_boundary(self) -> bool:
        """Whether the present micro-batch ends with an optimizer step."""
        return (self.micro_steps + 1) % self.steps == 0 if self.forced is None else self.forced
