"""What the tests of sparse attention compare with: attention over all scores, with -inf where there is none."""

from __future__ import annotations

import torch
from torch import Tensor


def dense_attention(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, bias: Tensor | None = None) -> Tensor:
    """By its formula, in the dtype given. ``allowed``: bool, broadcast to ``[batch, heads, queries, keys]``."""
    groups = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
    scores = query @ key.transpose(2, 3) * query.shape[3] ** -0.5
    if bias is not None:
        scores = scores + bias
    seen = (scores > float("-inf")) & allowed
    scores = scores.masked_fill(~seen, float("-inf"))
    empty = ~seen.any(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(empty, 0.0), dim=-1).masked_fill(empty, 0.0)
    return weights @ value


def of_tokens(layout: Tensor, block: int) -> Tensor:
    """A layout ``[heads, blocks, blocks]`` as a mask of tokens, bool."""
    return layout.bool().repeat_interleave(block, 1).repeat_interleave(block, 2)


def largest(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))
