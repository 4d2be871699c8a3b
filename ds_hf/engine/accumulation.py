"""Which micro-batch is the boundary: the last one before an optimizer step.

Invariant: a value forced by ``set_gradient_accumulation_boundary`` holds until it is set again; without one the
boundary is every ``steps``-th call of ``Engine.step``, or with ``managed_gradient_accumulation: false`` every call.
"""

from __future__ import annotations

from typing import NamedTuple

from ds_hf.config.types import Config
from ds_hf.errors import DsHfError
from ds_hf.log import warn_once

__all__ = ["Accumulation", "BatchSizes", "UnmanagedAccumulation", "WholeBatches", "accumulation_of"]


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
        micro_steps: calls of ``Engine.step`` since the start.
        forced: what ``set_gradient_accumulation_boundary`` said.
        stepping: ``Engine.step`` updates the weights at present.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.micro_steps = 0
        self.forced: bool | None = None
        self.stepping = False
        self._since = 0  # the micro-step from which on every ``steps``-th one is a boundary

    @property
    def at_boundary(self) -> bool:
        """Whether the present micro-batch ends with an optimizer step."""
        return (self.micro_steps - self._since + 1) % self.steps == 0 if self.forced is None else self.forced

    @property
    def updates(self) -> bool:
        """Whether ``Engine.step``, which begins now, is an optimizer step."""
        return self.at_boundary

    @property
    def keeps_sums(self) -> bool:
        """Whether ``Engine.zero_grad`` leaves reduced gradients alone, for they are of several micro-batches."""
        return self.steps > 1 or self.forced is not None

    def force(self, is_boundary: bool) -> None:
        """Say whether the coming backwards and steps end an accumulation."""
        self.forced = is_boundary

    def begun(self, backwards: int) -> int:
        """Micro-batches of the unfinished step, of which so many backwards have ended."""
        return (self.micro_steps - self._since) % self.steps if self.forced is None else backwards

    def change(self, steps: int) -> None:
        """Accumulate so many micro-batches from here on. DeepSpeed 0.19.8 goes on counting those since the start, so
        that the first step after a change may be one of fewer."""
        under_way = self.begun(0)
        if under_way and steps != self.steps and self.forced is None:
            warn_once(
                f"the micro-batches of a step change from {self.steps} to {steps} amid a step: the {under_way} before "
                "weigh as they did, so it is no mean. Change them between two steps, when "
                "engine.is_gradient_accumulation_boundary() was true at the last engine.step()"
            )
        self._since, self.steps = self.micro_steps - under_way, steps

    def resume(self, micro_steps: int) -> None:
        """Go on from a checkpoint. It has no gradients, so an accumulation that was under way begins anew."""
        self.micro_steps = self._since = micro_steps - micro_steps % self.steps

    def samples(self, batch: BatchSizes, backwards: int) -> int:
        """Samples of a step of so many backwards, of all processes."""
        return batch.train


class UnmanagedAccumulation(Accumulation):
    """``managed_gradient_accumulation: false``: the caller accumulates as many micro-batches as it likes, and
    ``Engine.step`` ends them. ``steps`` is what losses are divided by, and no more."""

    @property
    def at_boundary(self) -> bool:
        """It is not known which backward is the last; ``step`` reduces what they left."""
        return self.stepping if self.forced is None else self.forced

    @property
    def updates(self) -> bool:
        return self.forced is not False

    @property
    def keeps_sums(self) -> bool:
        return False

    def force(self, is_boundary: bool) -> None:
        raise DsHfError(
            "set_gradient_accumulation_boundary() with managed_gradient_accumulation: false: engine.step() is the "
            "boundary there; leave the call out, or the key"
        )

    def begun(self, backwards: int) -> int:
        return backwards

    def resume(self, micro_steps: int) -> None:
        self.micro_steps = micro_steps

    def samples(self, batch: BatchSizes, backwards: int) -> int:
        return batch.train // batch.accumulation_steps * backwards


class WholeBatches(Accumulation):
    """Of a pipeline, which runs all micro-batches of a step in one call.

    Attributes:
        last: the present backward is the last one of the step.
    """

    def __init__(self, steps: int) -> None:
        super().__init__(steps)
        self.last = False

    @property
    def at_boundary(self) -> bool:
        return self.last or self.stepping

    @property
    def updates(self) -> bool:
        return True

    def force(self, is_boundary: bool) -> None:
        raise DsHfError("set_gradient_accumulation_boundary() of a pipeline: train_batch() is a whole step")

    def begun(self, backwards: int) -> int:
        return 0

    def resume(self, micro_steps: int) -> None:
        self.micro_steps = micro_steps


def accumulation_of(settings: Config, *, whole_batches: bool = False) -> Accumulation:
    """As ``managed_gradient_accumulation`` says.

    Args:
        whole_batches: each step is one call, whatever it says.
    """
    if whole_batches:
        return WholeBatches(BatchSizes.of(settings).accumulation_steps)
    kind = Accumulation if settings.managed_gradient_accumulation else UnmanagedAccumulation
    return kind(BatchSizes.of(settings).accumulation_steps)
