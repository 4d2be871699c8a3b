"""``deepspeed.runtime.rollout.hybrid_engine_rollout``."""

from __future__ import annotations

from ds_hf.deepspeed_api.rollout.base import RolloutBatch, RolloutEngine, RolloutRequest, SamplingConfig
from ds_hf.deepspeed_api.rollout.continuous_batching import ContinuousBatchRequest, ContinuousBatchScheduler
from ds_hf.deepspeed_api.rollout.engine import HybridEngineRollout, HybridEngineRolloutConfig

from ..._missing import missing

__all__ = [
    "ContinuousBatchRequest",
    "ContinuousBatchScheduler",
    "HybridEngineRollout",
    "HybridEngineRolloutConfig",
    "RolloutBatch",
    "RolloutEngine",
    "RolloutRequest",
    "SamplingConfig",
]
__getattr__ = missing(__name__)
