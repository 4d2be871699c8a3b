"""``deepspeed.runtime.rollout.continuous_batching``."""

from __future__ import annotations

from ds_hf.deepspeed_api.rollout.continuous_batching import (
    ContinuousBatchRequest,
    ContinuousBatchScheduler,
    ContinuousBatchUpdate,
)

from ..._missing import missing

__all__ = [
    "ContinuousBatchRequest",
    "ContinuousBatchScheduler",
    "ContinuousBatchUpdate",
]
__getattr__ = missing(__name__)
