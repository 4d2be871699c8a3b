"""``deepspeed.sequence.cross_entropy``."""

from __future__ import annotations

from ds_hf.deepspeed_api.sequence.cross_entropy import (
    vocab_parallel_cross_entropy,
    vocab_sequence_parallel_cross_entropy,
)

from .._missing import missing

__all__ = ["vocab_parallel_cross_entropy", "vocab_sequence_parallel_cross_entropy"]
__getattr__ = missing(__name__)
