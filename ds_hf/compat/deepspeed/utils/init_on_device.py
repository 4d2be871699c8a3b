"""``deepspeed.utils.init_on_device``."""

from __future__ import annotations

from ds_hf.deepspeed_api.on_device import OnDevice

from .._missing import missing

__all__ = ["OnDevice"]
__getattr__ = missing(__name__)
