"""``deepspeed.runtime.checkpoint_engine``."""

from ds_hf.deepspeed_api.checkpoint_engine import CheckpointCommitInfo, TorchCheckpointEngine

from . import checkpoint_engine, torch_checkpoint_engine

__all__ = ["CheckpointCommitInfo", "TorchCheckpointEngine", "checkpoint_engine", "torch_checkpoint_engine"]
