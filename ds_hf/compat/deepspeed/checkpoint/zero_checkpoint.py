"""``deepspeed.checkpoint.zero_checkpoint``: files of optimizer states by rank."""

from .deepspeed_checkpoint import GROUP_STATE_KEY, ZeROCheckpoint

__all__ = ["GROUP_STATE_KEY", "ZeROCheckpoint"]
