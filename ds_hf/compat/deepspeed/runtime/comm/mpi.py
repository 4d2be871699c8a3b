"""``deepspeed.runtime.comm.mpi``."""

from __future__ import annotations

from ds_hf.deepspeed_api.compressed_backend import MpiBackend

from ..._missing import missing

__all__ = ["MpiBackend"]
__getattr__ = missing(__name__)
