"""``deepspeed.runtime.fp16.unfused_optimizer``: the optimizer that ``isinstance`` asks for."""

from __future__ import annotations

from ds_hf.engine.optim.sharded import ShardedOptimizer

from ..base_optimizer import DeepSpeedOptimizer, keeps_whole_masters

__all__ = ["FP16_UnfusedOptimizer"]


class FP16_UnfusedOptimizer(DeepSpeedOptimizer):
    """One of 16-bit parameters without ZeRO that looks at each tensor by itself: LAMB."""

    @staticmethod
    def fits(optimizer: ShardedOptimizer) -> bool:
        """Whether it is so."""
        return keeps_whole_masters(optimizer) and "lamb" in type(optimizer.optimizer).__name__.lower()
