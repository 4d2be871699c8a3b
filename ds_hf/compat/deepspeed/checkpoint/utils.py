"""``deepspeed.checkpoint.utils``."""

from __future__ import annotations

from ds_hf.engine.checkpoint.consolidate import clone_tensors_for_torch_save

from .._missing import missing

__all__ = ["clone_tensors_for_torch_save"]
__getattr__ = missing(__name__)
