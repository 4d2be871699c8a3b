"""``deepspeed.runtime.rollout.opsd``."""

from __future__ import annotations

from ds_hf.deepspeed_api.rollout.opsd import JSDLossOutput, ResponseTokenBatch, generalized_jsd_loss

from ..._missing import missing

__all__ = [
    "JSDLossOutput",
    "ResponseTokenBatch",
    "generalized_jsd_loss",
]
__getattr__ = missing(__name__)
