"""``deepspeed.runtime.checkpoint_engine.checkpoint_engine``."""

from ds_hf.deepspeed_api.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine

__all__ = ["CheckpointCommitInfo", "CheckpointEngine"]
