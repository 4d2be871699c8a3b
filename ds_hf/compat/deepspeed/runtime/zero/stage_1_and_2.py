"""``deepspeed.runtime.zero.stage_1_and_2``: what a model needs at stage 2, and the optimizer of isinstance."""

from __future__ import annotations

from ds_hf.engine.zero.estimate import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
)
from ds_hf.engine.optim.sharded import ShardedOptimizer

from ..base_optimizer import ZeROOptimizer, shards_parameters

__all__ = [
    "DeepSpeedZeroOptimizer",
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
]


class DeepSpeedZeroOptimizer(ZeROOptimizer):
    """One that shards optimizer states, or gradients too, and leaves parameters whole."""

    @staticmethod
    def fits(optimizer: ShardedOptimizer) -> bool:
        """Whether masters are sharded and parameters are not."""
        return not optimizer.whole and not shards_parameters(optimizer)
