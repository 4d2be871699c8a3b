"""``deepspeed.checkpoint.zero_checkpoint``: files of optimizer states by rank."""

from __future__ import annotations

from ds_hf.deepspeed_api.checkpoint.opened import GROUP_STATE_KEY, ZeROCheckpoint

from .._missing import missing

__all__ = ["GROUP_STATE_KEY", "ZeROCheckpoint"]
__getattr__ = missing(__name__)
