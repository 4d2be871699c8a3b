"""``deepspeed.checkpoint.universal_checkpoint``: parts of what universal checkpoints hold whole."""

from __future__ import annotations

from ds_hf.deepspeed_api.checkpoint.universal_checkpoint import (
    SubparamShape,
    enable_universal_checkpoint,
    load_hp_checkpoint_state,
)

from .._missing import missing

__all__ = ["SubparamShape", "enable_universal_checkpoint", "load_hp_checkpoint_state"]
__getattr__ = missing(__name__)
