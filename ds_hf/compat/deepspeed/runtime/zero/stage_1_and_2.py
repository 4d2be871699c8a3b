"""``deepspeed.runtime.zero.stage_1_and_2``: what a model needs at stage 2, and the optimizer of isinstance."""

from __future__ import annotations

from ds_hf.engine.zero.estimate import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
)
from ds_hf.deepspeed_api.optimizer_kinds import DeepSpeedZeroOptimizer

from ..._missing import missing

__all__ = [
    "DeepSpeedZeroOptimizer",
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
]
__getattr__ = missing(__name__)
