"""``deepspeed.runtime.activation_checkpointing``."""

from __future__ import annotations


from ..._missing import missing
from . import checkpointing, offload_activations

__all__ = ["checkpointing", "offload_activations"]
__getattr__ = missing(__name__)
