"""``deepspeed.runtime.activation_checkpointing``."""

from __future__ import annotations


from ..._missing import missing
from . import checkpointing

__all__ = ["checkpointing"]
__getattr__ = missing(__name__)
