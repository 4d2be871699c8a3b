"""Which micro-batch is the boundary: the last one before an optimizer step.

Invariant: a value forced by ``set_gradient_accumulation_boundary`` holds until it is set again; without one the
boundary is every ``steps``-th call of ``Engine.step``.
"""

from __future__ import annotations

from typing import NamedTuple

from ds_hf.config.types import Config

__all__ = ["Accumulation", "BatchSizes"]


class BatchSizes(NamedTuple):
    """The batch triple of a resolved configuration, in samples and micro-batches."""

    train: int
    micro: int
    accumulation_steps: int

    @classmethod
    def of(cls, settings: Config) -> BatchSizes:
        """Read the triple; ``load_config`` has filled it."""
        train, micro = settings.train_batch_size, settings.train_micro_batch_size_per_gpu
        steps = settings.gradient_accumulation_steps
        assert train is not None
        assert micro is not None
        assert steps is not None
        return cls(train, micro, steps)


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
