"""``deepspeed.runtime.zero.stage3``: what a model needs at stage 3, and the optimizer that ``isinstance`` asks for."""

from __future__ import annotations

from ds_hf.engine.zero.estimate import (
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from ds_hf.engine.optim.sharded import ShardedOptimizer

from ..base_optimizer import ZeROOptimizer, shards_parameters

__all__ = [
    "DeepSpeedZeroOptimizer_Stage3",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
]


class DeepSpeedZeroOptimizer_Stage3(ZeROOptimizer):
    """One that shards parameters too."""

    @staticmethod
    def fits(optimizer: ShardedOptimizer) -> bool:
        """Whether parameters are sharded."""
        return not optimizer.whole and shards_parameters(optimizer)
