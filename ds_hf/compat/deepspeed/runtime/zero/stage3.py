"""``deepspeed.runtime.zero.stage3``: what a model needs at stage 3, and the optimizer that ``isinstance`` asks for."""

from __future__ import annotations

from ds_hf.engine.zero.estimate import (
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from ds_hf.deepspeed_api.optimizer_kinds import DeepSpeedZeroOptimizer_Stage3

from ..._missing import missing

__all__ = [
    "DeepSpeedZeroOptimizer_Stage3",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
]
__getattr__ = missing(__name__)
