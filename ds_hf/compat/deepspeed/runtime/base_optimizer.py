"""``deepspeed.runtime.base_optimizer``: optimizer classes as questions about ours, by ``isinstance``.

DeepSpeed has a class for each way of keeping states, and scripts ask which one they hold. ds_hf has one class;
these answer from where it keeps what.
"""

from __future__ import annotations

from typing import Any

from ds_hf.engine.optim.sharded import ShardedOptimizer

__all__ = [
    "DeepSpeedOptimizer",
    "ZeROOptimizer",
]


class _Kind(type):
    """A class whose instances are found by looking at them."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, ShardedOptimizer) and bool(cls.fits(instance))  # type: ignore[attr-defined]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"{cls.__name__} is made by deepspeed.initialize(), not by its constructor")


class DeepSpeedOptimizer(metaclass=_Kind):
    """Any optimizer that an engine made."""

    @staticmethod
    def fits(optimizer: ShardedOptimizer) -> bool:
        """Always."""
        return True


class ZeROOptimizer(DeepSpeedOptimizer):
    """One that keeps a shard of the optimizer states on each rank."""

    @staticmethod
    def fits(optimizer: ShardedOptimizer) -> bool:
        """Whether masters are sharded."""
        return not optimizer.whole


def shards_parameters(optimizer: ShardedOptimizer) -> bool:
    """Whether the parameters lie in shards, and not the states alone."""
    return any(buffer.sharded for buffer in optimizer.masters)


def keeps_whole_masters(optimizer: ShardedOptimizer) -> bool:
    """Whether each process has the masters of all parameters, beside 16-bit ones."""
    return optimizer.whole and any(buffer.dtype.itemsize == 2 for buffer in optimizer.masters)
