"""Small models for tests, each with something that a ZeRO engine can get wrong.

Invariant: built from the same seed they have the same weights on every rank, and no layer is random in forward.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["Block", "TinyLM", "token_batches"]

Checkpointing = Literal["reentrant", "nonreentrant"] | None


class Block(nn.Module):
    """Residual MLP: a norm, a matrix with a bias and one without."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class TinyLM(nn.Module):
    """A language model with tied embedding and head, repeated blocks, a norm and a buffer; returns its mean loss.

    Args:
        vocab, width, depth: sizes.
        checkpointing: recompute each block in backward.
        tied: whether the head is the embedding.
    """

    def __init__(
        self,
        vocab: int = 48,
        width: int = 32,
        depth: int = 3,
        checkpointing: Checkpointing = None,
        tied: bool = True,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.register_buffer("gain", torch.ones(width))
        self.checkpointing = checkpointing

    def logits(self, tokens: Tensor) -> Tensor:
        """``[batch, length]`` tokens to ``[batch, length, vocab]``."""
        embedded: Tensor = self.embedding(tokens)
        x = embedded * self.gain.to(embedded.dtype)
        for block in self.blocks:
            if self.checkpointing is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
        return self.head(self.norm(x))

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.logits(tokens)
        return F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


def token_batches(*shape: int, vocab: int = 48, seed: int = 5) -> Tensor:
    """Random tokens, the same for the same arguments."""
    return torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(seed))
