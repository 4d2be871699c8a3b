"""``deepspeed.sequence``: sequence parallelism for models with their own attention."""

from . import cross_entropy, layer
from .cross_entropy import (
    VocabParallelCausalLMLoss,
    VocabParallelCrossEntropyLoss,
    configure_vocab_parallel_loss,
    vocab_parallel_cross_entropy,
)

__all__ = [
    "VocabParallelCausalLMLoss",
    "VocabParallelCrossEntropyLoss",
    "configure_vocab_parallel_loss",
    "cross_entropy",
    "layer",
    "vocab_parallel_cross_entropy",
]
