"""``deepspeed.runtime.comm.nccl``."""

from __future__ import annotations

from ds_hf.deepspeed_api.compressed_backend import NcclBackend

from ..._missing import missing

__all__ = ["NcclBackend"]
__getattr__ = missing(__name__)
