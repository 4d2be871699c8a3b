"""Distillation on what the student says itself (``deepspeed.runtime.rollout.opsd``, DeepSpeed 0.19.8)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


from .base import RolloutBatch

__all__ = ["JSDLossOutput", "ResponseTokenBatch", "generalized_jsd_loss"]


@dataclass(frozen=True)
class ResponseTokenBatch:
    """A rollout as targets of a causal model: logits at position ``i`` predict ``target_ids[:, i]``.

    Attributes:
        input_ids, attention_mask: ``[B, T]``.
        target_ids: ``[B, T - 1]`` tokens.
        response_mask: ``[B, T - 1]`` bool, where the target is a token of the response.
    """

    input_ids: Tensor
    attention_mask: Tensor
    target_ids: Tensor
    response_mask: Tensor

    @classmethod
    def from_rollout(cls, rollout: RolloutBatch) -> ResponseTokenBatch:
        """The targets in ``rollout``.

        Raises:
            ValueError: its tensors lie on several devices, or responses begin outside of the sequence.
        """
        ids, mask, starts = rollout.input_ids, rollout.attention_mask, rollout.response_start_idx
        for name, other in (("attention_mask", mask), ("response_start_idx", starts)):
            if ids.device != other.device:
                raise ValueError(f"rollout input_ids and {name} must be on the same device")
        if starts.dtype not in (torch.int32, torch.int64):
            raise ValueError("rollout response_start_idx must use an integer dtype")
        if bool(((starts < 1) | (starts > ids.shape[1])).any()):
            raise ValueError("rollout response_start_idx must be in [1, sequence_length]")
        places = torch.arange(1, ids.shape[1], device=ids.device)
        return cls(ids, mask, ids[:, 1:], mask[:, 1:].bool() & (places >= starts[:, None]))

    def select_causal_logits(self, logits: Tensor) -> Tensor:
        """``[B, T, V]`` logits to the ``[B, T - 1, V]`` that predict the targets.

        Raises:
            ValueError: the shape is another.
        """
        if logits.dim() != 3:
            raise ValueError("logits must be 3-D [batch, sequence_length, vocabulary_size]")
        if logits.shape[:2] != self.input_ids.shape:
            raise ValueError("logits batch and sequence dimensions must match input_ids")
        return logits[:, :-1]


@dataclass(frozen=True)
class JSDLossOutput:
    """The mean ``loss``, and the sum and the number of tokens that it is made of, to be added up over ranks."""

    loss: Tensor
    loss_sum: Tensor
    valid_token_count: Tensor


def generalized_jsd_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    response_mask: Tensor,
    beta: float = 0.5,
    temperature: float = 1.0,
    teacher_top_k: int | None = None,
    pointwise_clip: float | None = None,
) -> JSDLossOutput:
    """Generalized Jensen-Shannon divergence of two models over the tokens of responses (GKD, arXiv 2306.13649).

    Args:
        student_logits, teacher_logits: ``[B, T, V]``.
        response_mask: ``[B, T]``, the positions that count.
        beta: 0 is KL(teacher | student), 1 is KL(student | teacher); between, both against the mixture with ``beta`` of
            the teacher.
        teacher_top_k: only the teacher's likeliest tokens, normalized anew.
        pointwise_clip: at most so much for each entry of the vocabulary.

    Raises:
        ValueError: shapes do not match, or a number is out of its range.
    """
    _check_jsd(student_logits, teacher_logits, response_mask, beta, temperature, teacher_top_k, pointwise_clip)
    student, teacher = student_logits / temperature, teacher_logits / temperature
    if teacher_top_k is not None:
        likeliest = teacher.topk(teacher_top_k, dim=-1).indices
        student, teacher = student.gather(-1, likeliest), teacher.gather(-1, likeliest)
    student, teacher = F.log_softmax(student, dim=-1), F.log_softmax(teacher, dim=-1)
    if beta == 0.0:
        entries = teacher.exp() * (teacher - student)
    elif beta == 1.0:
        entries = student.exp() * (student - teacher)
    else:
        mixture = torch.logaddexp(student + math.log1p(-beta), teacher + math.log(beta))
        entries = beta * teacher.exp() * (teacher - mixture) + (1.0 - beta) * student.exp() * (student - mixture)
    if pointwise_clip is not None:
        entries = entries.clamp(max=pointwise_clip)
    counts = response_mask.to(entries.dtype)
    total, tokens = (entries.sum(dim=-1) * counts).sum(), counts.sum().long()
    return JSDLossOutput(total / tokens.clamp_min(1), total, tokens)


def _check_jsd(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor,
    beta: float,
    temperature: float,
    top_k: int | None,
    clip: float | None,
) -> None:
    if student.shape != teacher.shape or student.dim() != 3:
        raise ValueError("student_logits and teacher_logits must have matching 3-D shapes")
    if mask.shape != student.shape[:2]:
        raise ValueError("response_mask shape must match logits batch and sequence dimensions")
    if not 0.0 <= beta <= 1.0:
        raise ValueError("beta must be in [0, 1]")
    if temperature <= 0.0:
        raise ValueError("temperature must be positive")
    if top_k is not None and top_k <= 0:
        raise ValueError("teacher_top_k must be positive when specified")
    if top_k is not None and top_k > student.shape[-1]:
        raise ValueError("teacher_top_k must not exceed the vocabulary size")
    if clip is not None and clip < 0.0:
        raise ValueError("pointwise_clip must be non-negative when specified")
