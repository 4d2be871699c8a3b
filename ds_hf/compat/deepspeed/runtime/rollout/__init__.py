"""``deepspeed.runtime.rollout``."""

from __future__ import annotations

from ds_hf.deepspeed_api.rollout import build_rollout
from ds_hf.deepspeed_api.rollout.base import RolloutBatch, RolloutConfig, RolloutEngine, RolloutRequest, SamplingConfig
from ds_hf.deepspeed_api.rollout.engine import HybridEngineRollout
from ds_hf.deepspeed_api.rollout.opsd import JSDLossOutput, ResponseTokenBatch, generalized_jsd_loss

from ..._missing import missing
from . import base, continuous_batching, hybrid_engine_rollout, opsd

__all__ = [
    "HybridEngineRollout",
    "JSDLossOutput",
    "ResponseTokenBatch",
    "RolloutBatch",
    "RolloutConfig",
    "RolloutEngine",
    "RolloutRequest",
    "SamplingConfig",
    "base",
    "build_rollout",
    "continuous_batching",
    "generalized_jsd_loss",
    "hybrid_engine_rollout",
    "opsd",
]
__getattr__ = missing(__name__)
