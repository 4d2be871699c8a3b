"""``deepspeed.runtime.activation_checkpointing``."""

from . import checkpointing, offload_activations

__all__ = ["checkpointing", "offload_activations"]
