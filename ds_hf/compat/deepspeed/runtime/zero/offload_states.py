"""``deepspeed.runtime.zero.offload_states``."""

from ds_hf import Engine

__all__ = ["get_state_devices"]

get_state_devices = Engine.state_devices
