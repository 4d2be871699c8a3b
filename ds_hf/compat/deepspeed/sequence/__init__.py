"""``deepspeed.sequence``: sequence parallelism for models with their own attention."""

from __future__ import annotations

from .._missing import missing
from . import cross_entropy, layer
from .cross_entropy import vocab_parallel_cross_entropy

__all__ = ["cross_entropy", "layer", "vocab_parallel_cross_entropy"]
__getattr__ = missing(__name__)
