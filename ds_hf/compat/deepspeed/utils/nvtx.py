"""``deepspeed.utils.nvtx``."""

from __future__ import annotations

from ds_hf.deepspeed_api.messages import instrument_w_nvtx

from .._missing import missing

__all__ = ["instrument_w_nvtx"]
__getattr__ = missing(__name__)
