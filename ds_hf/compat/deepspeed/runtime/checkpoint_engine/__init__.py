"""``deepspeed.runtime.checkpoint_engine``."""

from __future__ import annotations

from ds_hf.deepspeed_api.checkpoint_engine import CheckpointCommitInfo, TorchCheckpointEngine

from ..._missing import missing
from . import checkpoint_engine, torch_checkpoint_engine

__all__ = ["CheckpointCommitInfo", "TorchCheckpointEngine", "checkpoint_engine", "torch_checkpoint_engine"]
__getattr__ = missing(__name__)
