"""What a student's outputs are away from a teacher's. Sums are over the positions that count, in fp32."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from ds_hf.engine.modules.tiling.loss import divisor, tiled_loss

__all__ = ["attention_loss", "hidden_loss", "logits_loss"]

_CHUNK_NBYTES = 256 << 20  # of one chunk of logits, in fp32


def logits_loss(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor | None = None,
    *,
    temperature: float = 1.0,
    beta: float = 0.0,
    num_items: Tensor | float | None = None,
) -> Tensor:
    """Divergence of two distributions over a vocabulary, mean of a position, times ``temperature`` squared.

    Computed in chunks of positions whose gradient is taken at once: beside the logits that are there, one gradient of
    the student's exists, and no probabilities of all positions.

    Args:
        student: logits ``[..., vocabulary]`` of any floating-point dtype; gradients go back to them.
        teacher: the same shape.
        mask: ``[...]``, positions that count; default all.
        beta: 0 is KL(teacher | student), 1 KL(student | teacher); between, both against the mixture with ``beta`` of
            the teacher (generalized Jensen-Shannon).
        num_items: what the sum is divided by; default the positions that count, at least 1.

    Returns:
        fp32 ``[]``.

    Raises:
        ValueError: shapes differ, or a number is out of its range.
    """
    if student.shape != teacher.shape:
        raise ValueError(
            f"logits of the student are {list(student.shape)} and of the teacher {list(teacher.shape)}: they need the "
            "same tokens and the same vocabulary"
        )
    if temperature <= 0 or not 0 <= beta <= 1:
        raise ValueError(f"temperature {temperature} must be more than 0, and beta {beta} between 0 and 1")
    counts = torch.ones(student.shape[:-1], device=student.device) if mask is None else mask.to(torch.float32)
    rows = (student.flatten(0, -2), teacher.detach().flatten(0, -2), counts.flatten())
    vocabulary = student.shape[-1]

    def of_rows(s: Tensor, t: Tensor, weight: Tensor) -> Tensor:
        ours, theirs = (torch.log_softmax(each.float() / temperature, dim=-1) for each in (s, t))
        return (_divergence(ours, theirs, beta) * weight).sum()

    chunks = max(1, math.ceil(len(rows[0]) * vocabulary * 4 / _CHUNK_NBYTES))
    total = of_rows(*rows) if chunks == 1 else tiled_loss(of_rows, rows, [], min(chunks, len(rows[0])), mean=False)
    return total * temperature**2 / (counts.sum().clamp(min=1) if num_items is None else divisor(num_items))


def _divergence(ours: Tensor, theirs: Tensor, beta: float) -> Tensor:
    """``[rows]`` of logarithms ``[rows, vocabulary]``."""
    if beta == 0:
        return (theirs.exp() * (theirs - ours)).sum(-1)
    if beta == 1:
        return (ours.exp() * (ours - theirs)).sum(-1)
    mixture = torch.logaddexp(ours + math.log1p(-beta), theirs + math.log(beta))
    entries = beta * theirs.exp() * (theirs - mixture) + (1 - beta) * ours.exp() * (ours - mixture)
    return entries.sum(-1)


def hidden_loss(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor | None = None,
    *,
    kind: Literal["mse", "cosine"] = "mse",
    num_items: Tensor | float | None = None,
) -> Tensor:
    """Distance of hidden states, mean of a position.

    Args:
        student: ``[..., width]``; gradients go back to it.
        teacher: the same shape; see ``Recipe.projection``.
        mask: ``[...]``, positions that count; default all.
        kind: mean squared difference, or 1 - cosine.
        num_items: see ``logits_loss``.

    Returns:
        fp32 ``[]``.

    Raises:
        ValueError: shapes differ.
    """
    if student.shape != teacher.shape:
        raise ValueError(f"hidden states are {list(student.shape)} and {list(teacher.shape)}: project the student's")
    ours, theirs = student.float(), teacher.detach().float()
    if kind == "mse":
        each = (ours - theirs).square().mean(-1)
    else:
        each = 1 - functional.cosine_similarity(ours, theirs, dim=-1)
    return _mean(each, mask, num_items)


def attention_loss(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor | None = None,
    *,
    kind: Literal["mse", "kl"] = "mse",
    num_items: Tensor | float | None = None,
) -> Tensor:
    """Distance of attention maps, mean of a position; of models with unequal numbers of heads, of the heads' means.

    Args:
        student: ``[batch, heads, positions, positions]``, rows sum to 1; gradients go back to it.
        teacher: the same, of any number of heads.
        mask: ``[batch, positions]``, rows that count; default all.
        kind: sum of squared differences of a row, or KL(teacher | student); both a mean over heads.
        num_items: see ``logits_loss``.

    Returns:
        fp32 ``[]``.

    Raises:
        ValueError: shapes differ in more than heads.
    """
    ours, theirs = student.float(), teacher.detach().float()
    if ours.shape[1] != theirs.shape[1]:
        ours, theirs = ours.mean(1, keepdim=True), theirs.mean(1, keepdim=True)
    if ours.shape != theirs.shape:
        raise ValueError(f"attention maps are {list(student.shape)} and {list(teacher.shape)}")
    if kind == "mse":
        each = (ours - theirs).square().sum(-1)
    else:
        least = torch.finfo(torch.float32).tiny
        each = (theirs * (theirs.clamp(min=least).log() - ours.clamp(min=least).log())).sum(-1)
    return _mean(each.mean(1), mask, num_items)


def _mean(each: Tensor, mask: Tensor | None, num_items: Tensor | float | None) -> Tensor:
    counts = torch.ones_like(each) if mask is None else mask.to(each.dtype)
    # not a product alone: what does not count may be nan
    total = torch.where(counts != 0, each, torch.zeros_like(each)).mul(counts).sum()
    return total / (counts.sum().clamp(min=1) if num_items is None else divisor(num_items))
