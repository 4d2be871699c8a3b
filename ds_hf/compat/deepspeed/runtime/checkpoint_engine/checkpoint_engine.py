"""``deepspeed.runtime.checkpoint_engine.checkpoint_engine``."""

from __future__ import annotations

from ds_hf.deepspeed_api.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine

from ..._missing import missing

__all__ = ["CheckpointCommitInfo", "CheckpointEngine"]
__getattr__ = missing(__name__)
