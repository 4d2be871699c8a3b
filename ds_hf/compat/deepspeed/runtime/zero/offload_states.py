"""``deepspeed.runtime.zero.offload_states``."""

from __future__ import annotations

from ds_hf import Engine

from ..._missing import missing

__all__ = ["get_state_devices"]

get_state_devices = Engine.state_devices

__getattr__ = missing(__name__)
