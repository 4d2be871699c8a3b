"""``deepspeed.runtime.activation_checkpointing.offload_activations``."""

from __future__ import annotations

from ds_hf.deepspeed_api.offload_activations import (
    CheckpointActivationOffloadStats,
    CheckpointHiddenStatesOffload,
    get_checkpoint_hidden_states_offloading_ctx_manager,
    patch_gradient_checkpointing_layer_marker,
)

from ..._missing import missing

__all__ = [
    "CheckpointActivationOffloadStats",
    "CheckpointHiddenStatesOffload",
    "get_checkpoint_hidden_states_offloading_ctx_manager",
    "patch_gradient_checkpointing_layer_marker",
]
__getattr__ = missing(__name__)
