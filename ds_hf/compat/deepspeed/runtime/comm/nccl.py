"""``deepspeed.runtime.comm.nccl``."""

from __future__ import annotations

from ..._missing import missing
from .compressed import CompressedBackend

__all__ = ["NcclBackend"]


class NcclBackend(CompressedBackend):
    """As ``CompressedBackend``, over whatever backend the process group has."""


__getattr__ = missing(__name__)
