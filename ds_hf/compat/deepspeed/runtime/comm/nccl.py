"""``deepspeed.runtime.comm.nccl``."""

from __future__ import annotations

from .compressed import CompressedBackend

__all__ = ["NcclBackend"]


class NcclBackend(CompressedBackend):
    """As ``CompressedBackend``, over whatever backend the process group has."""
