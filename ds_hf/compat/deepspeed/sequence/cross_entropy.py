"""``deepspeed.sequence.cross_entropy``."""

from __future__ import annotations

from ds_hf.deepspeed_api.sequence.cross_entropy import (
    VocabParallelCausalLMLoss,
    VocabParallelCrossEntropyLoss,
    configure_vocab_parallel_loss,
    validate_vocab_parallel_loss,
    vocab_parallel_cross_entropy,
    vocab_sequence_parallel_cross_entropy,
)

from .._missing import missing

__all__ = [
    "VocabParallelCausalLMLoss",
    "VocabParallelCrossEntropyLoss",
    "configure_vocab_parallel_loss",
    "validate_vocab_parallel_loss",
    "vocab_parallel_cross_entropy",
    "vocab_sequence_parallel_cross_entropy",
]
__getattr__ = missing(__name__)
