"""``deepspeed.comm``: torch's collectives on torch's default group, with DeepSpeed's arguments."""

from . import comm
from .comm import *  # noqa: F403 (its __all__ is the list of both)

__all__ = ["comm", *comm.__all__]
