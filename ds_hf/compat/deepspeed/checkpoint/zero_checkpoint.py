"""``deepspeed.checkpoint.zero_checkpoint``: files of optimizer states by rank."""

from __future__ import annotations

from .._missing import missing
from .deepspeed_checkpoint import GROUP_STATE_KEY, ZeROCheckpoint

__all__ = ["GROUP_STATE_KEY", "ZeROCheckpoint"]
__getattr__ = missing(__name__)
