"""``deepspeed.runtime.bf16_optimizer``: the optimizer that ``isinstance`` asks for."""

from __future__ import annotations

import torch

from ds_hf.engine.optim.sharded import ShardedOptimizer

from .base_optimizer import DeepSpeedOptimizer, keeps_whole_masters

__all__ = ["BF16_Optimizer"]


class BF16_Optimizer(DeepSpeedOptimizer):
    """One of bf16 parameters, with whole masters on each process: without ZeRO."""

    @staticmethod
    def fits(optimizer: ShardedOptimizer) -> bool:
        """Whether it is so."""
        return keeps_whole_masters(optimizer) and all(b.dtype == torch.bfloat16 for b in optimizer.masters)
