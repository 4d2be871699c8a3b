"""``deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine``."""

from __future__ import annotations

from ds_hf.deepspeed_api.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine, TorchCheckpointEngine

from ..._missing import missing

__all__ = ["CheckpointCommitInfo", "CheckpointEngine", "TorchCheckpointEngine"]
__getattr__ = missing(__name__)
