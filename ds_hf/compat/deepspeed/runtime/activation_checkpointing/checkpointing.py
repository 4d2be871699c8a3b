"""``deepspeed.checkpointing``: checkpointed functions and tracked random states."""

from __future__ import annotations

from ds_hf.deepspeed_api.activation_checkpointing import (
    activation_checkpointing,
    non_reentrant_checkpoint,
)
from ds_hf.deepspeed_api.activation_checkpointing import (
    checkpoint_function as checkpoint,
)
from ds_hf.deepspeed_api.activation_checkpointing import RngTracker as CudaRNGStatesTracker

from ..._missing import missing

__all__ = [
    "CudaRNGStatesTracker",
    "checkpoint",
    "configure",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "model_parallel_reconfigure_tp_seed",
    "non_reentrant_checkpoint",
    "partition_activations_in_checkpoint",
    "reset",
    "set_num_layers",
]

_state = activation_checkpointing()
configure = _state.configure
get_cuda_rng_tracker = _state.get_cuda_rng_tracker
is_configured = _state.is_configured
model_parallel_cuda_manual_seed = _state.model_parallel_cuda_manual_seed
model_parallel_reconfigure_tp_seed = _state.model_parallel_reconfigure_tp_seed
partition_activations_in_checkpoint = _state.partition_activations_in_checkpoint
reset = _state.reset
set_num_layers = _state.set_num_layers

_absent = missing(__name__)
_SETTINGS = {
    "CPU_CHECKPOINT": "in_host_memory",
    "PARTITION_ACTIVATIONS": "partitions",
    "CONTIGUOUS_CHECKPOINTING": "contiguous",
    "SYNCHRONIZE": "synchronize",
    "PROFILE_TIME": "profile",
    "mpu": "mpu",
    "num_layers": "num_layers",
    "deepspeed_checkpointing_enabled": "configured",
}


def __getattr__(name: str) -> object:
    """The settings as they are now, under the names of DeepSpeed's module variables."""
    return getattr(_state, _SETTINGS[name]) if name in _SETTINGS else _absent(name)
