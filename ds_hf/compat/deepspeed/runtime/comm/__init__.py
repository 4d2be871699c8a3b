"""``deepspeed.runtime.comm``."""

from . import compressed, mpi, nccl

__all__ = ["compressed", "mpi", "nccl"]
