"""``deepspeed.runtime.fp16.fused_optimizer``: the optimizer that ``isinstance`` asks for."""

from __future__ import annotations

from ds_hf.engine.optim.sharded import ShardedOptimizer

from ..base_optimizer import DeepSpeedOptimizer, keeps_whole_masters

__all__ = ["FP16_Optimizer"]


class FP16_Optimizer(DeepSpeedOptimizer):
    """One of 16-bit parameters, with whole masters on each process: without ZeRO. Its moments lie flat."""

    @staticmethod
    def fits(optimizer: ShardedOptimizer) -> bool:
        """Whether it is so."""
        return keeps_whole_masters(optimizer) and "lamb" not in type(optimizer.optimizer).__name__.lower()
