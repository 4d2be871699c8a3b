"""``deepspeed.runtime.comm.compressed``."""

from __future__ import annotations

from ds_hf.deepspeed_api.compressed_backend import CompressedBackend

from ..._missing import missing

__all__ = ["CompressedBackend"]
__getattr__ = missing(__name__)
