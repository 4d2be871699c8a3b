"""``deepspeed.runtime.comm``."""

from __future__ import annotations

from ..._missing import missing
from . import compressed, mpi, nccl

__all__ = ["compressed", "mpi", "nccl"]
__getattr__ = missing(__name__)
