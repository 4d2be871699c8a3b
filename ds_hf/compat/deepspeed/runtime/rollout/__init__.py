"""``deepspeed.runtime.rollout``: batches of samples of the model that is trained."""

from __future__ import annotations

from typing import Any

from . import base, continuous_batching, hybrid_engine_rollout, opsd
from .base import RolloutBatch, RolloutConfig, RolloutEngine, RolloutRequest, SamplingConfig
from .hybrid_engine_rollout import HybridEngineRollout
from .opsd import JSDLossOutput, ResponseTokenBatch, generalized_jsd_loss

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


def build_rollout(rollout_cfg: Any, student_engine: Any = None, tokenizer: Any = None, **kwargs: Any) -> RolloutEngine:
    """The rollout engine that ``rollout_cfg.engine`` names: ``"hybrid_engine"``, which samples from the engine itself.

    Raises:
        ValueError: another name, or the engine or the tokenizer is missing.
    """
    if rollout_cfg.engine != "hybrid_engine":
        raise ValueError(f"Unknown rollout engine {rollout_cfg.engine!r}; choose from 'hybrid_engine'")
    if student_engine is None or tokenizer is None:
        raise ValueError("hybrid_engine rollout needs both student_engine and tokenizer")
    return HybridEngineRollout(student_engine, tokenizer, rollout_cfg)
