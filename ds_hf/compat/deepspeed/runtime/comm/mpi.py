"""``deepspeed.runtime.comm.mpi``."""

from __future__ import annotations

from typing import Any

from .compressed import CompressedBackend

__all__ = ["MpiBackend"]


class MpiBackend(CompressedBackend):
    """As ``CompressedBackend``; the process group's backend is used, not MPI.

    Args:
        cuda_aware: no effect.
    """

    def __init__(self, cuda_aware: bool = False, mpu: Any = None) -> None:
        super().__init__(mpu)
