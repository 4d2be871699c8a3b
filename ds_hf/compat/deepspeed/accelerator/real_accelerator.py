"""``deepspeed.accelerator.real_accelerator``: the device of this process."""

from __future__ import annotations

from ds_hf.deepspeed_api.accelerator import get_accelerator, is_current_accelerator_supported

from .._missing import missing

__all__ = ["get_accelerator", "is_current_accelerator_supported"]
__getattr__ = missing(__name__)
