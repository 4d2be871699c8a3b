"""``deepspeed.runtime.rollout.base``."""

from __future__ import annotations

from ds_hf.deepspeed_api.rollout.base import RolloutBatch, RolloutConfig, RolloutEngine, RolloutRequest, SamplingConfig

from ..._missing import missing

__all__ = [
    "RolloutBatch",
    "RolloutConfig",
    "RolloutEngine",
    "RolloutRequest",
    "SamplingConfig",
]
__getattr__ = missing(__name__)
