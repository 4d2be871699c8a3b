"""``deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine``."""

from ds_hf.deepspeed_api.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine, TorchCheckpointEngine

__all__ = ["CheckpointCommitInfo", "CheckpointEngine", "TorchCheckpointEngine"]
