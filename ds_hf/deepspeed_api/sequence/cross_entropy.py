"""Cross entropy of logits whose tokens, and perhaps whose vocabulary, are divided:
``deepspeed.sequence.cross_entropy``."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hf.deepspeed_api import groups
from ds_hf.engine.comm.collectives import all_reduce_max, all_reduce_sum
from ds_hf.engine.comm.mesh import Axis, axis_of
from ds_hf.engine.sequence.losses import gather, gather_whole

__all__ = ["vocab_parallel_cross_entropy", "vocab_sequence_parallel_cross_entropy"]

Group = dist.ProcessGroup | None
Reduction = Literal["none", "sum", "mean"]


def vocab_sequence_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    sp_group: Group,
    tp_group: Group = None,
    vocab_start_index: int | None = None,
    vocab_end_index: int | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "none",
    gather_sequence_loss: bool = True,
    backend: Literal["torch", "liger"] = "torch",
) -> Tensor:
    """``vocab_parallel_cross_entropy``, whose losses are by default gathered over the sequence: ``[sequence, ...]``.

    The gradient of the gather is this process's slice of it, as DeepSpeed's, which fits gradients that are summed over
    the sequence. An engine that averages them (``ds_hf.sequence_gradients``, the default) gets the sum of the slices of
    all processes, so that its average is the gradient of the whole loss.

    Args:
        vocab_parallel_logits: ``[tokens, ..., vocabulary]`` of this process; target: ``[tokens, ...]``.
        sp_group: the processes that share the sequence, along dimension 0.

    Returns:
        ``[tokens of all processes, ...]``, fp32; a number with a ``reduction``; ``[tokens, ...]`` of this process alone
        where neither.

    Raises:
        ValueError: see ``vocab_parallel_cross_entropy``.
    """
    if gather_sequence_loss and reduction != "none":
        raise ValueError("gather_sequence_loss is only supported with reduction='none'")
    if gather_sequence_loss and sp_group is None:
        raise ValueError("sp_group is required when gather_sequence_loss=True")
    loss = vocab_parallel_cross_entropy(
        vocab_parallel_logits,
        target,
        tp_group,
        sp_group,
        vocab_start_index,
        vocab_end_index,
        ignore_index=ignore_index,
        reduction=reduction,
        backend=backend,
    )
    if not gather_sequence_loss:
        return loss
    axis = axis_of(sp_group, "sequence")
    return gather(loss, axis) if groups.averages_sequence() else _GatherSlices.apply(loss, axis)  # type: ignore[no-untyped-call]


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    tp_group: Group = None,
    sp_group: Group = None,
    vocab_start_index: int | None = None,
    vocab_end_index: int | None = None,
    global_vocab_size: int | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    gather_sequence_loss: bool = False,
    backend: Literal["torch", "liger"] = "torch",
) -> Tensor:
    """Cross entropy in fp32 where the processes of ``tp_group`` hold parts of the vocabulary, and those of ``sp_group``
    parts of the tokens.

    Args:
        vocab_parallel_logits: ``[tokens, ..., vocabulary / tp]``; target: ``[tokens, ...]``, indices of the whole one.
        vocab_start_index, vocab_end_index: the part that is here; default equal parts in the order of the ranks.
        reduction: "mean" over the tokens of all processes whose target is not ``ignore_index``.
        gather_sequence_loss: losses of all processes along dimension 0, with the true adjoint.
        backend: "liger" is computed as "torch".

    Raises:
        ValueError: shapes, bounds or targets that do not fit, or an unknown word.
    """
    if vocab_parallel_logits.shape[:-1] != target.shape:
        raise ValueError("vocab_parallel_logits and target must have matching non-vocabulary dimensions")
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f"Unsupported reduction: {reduction}")
    if backend not in ("torch", "liger"):
        raise ValueError(f"Unsupported vocabulary-parallel CE backend: {backend}")
    if gather_sequence_loss and (reduction != "none" or sp_group is None):
        raise ValueError("gather_sequence_loss is only supported with reduction='none', and with an sp_group")
    if (vocab_start_index is None) != (vocab_end_index is None):
        raise ValueError("vocab_start_index and vocab_end_index must be provided together")
    tensor = None if tp_group is None or dist.get_world_size(tp_group) == 1 else axis_of(tp_group, "tensor")
    start, whole = _part(vocab_parallel_logits, tensor, vocab_start_index, vocab_end_index)
    whole = whole if global_vocab_size is None else global_vocab_size
    if bool(((target != ignore_index) & ((target < 0) | (target >= whole))).any()):
        raise ValueError(f"Target is out of range for vocabulary size {whole}")
    loss: Tensor = _CrossEntropy.apply(vocab_parallel_logits, target.long(), tensor, start, ignore_index)  # type: ignore[no-untyped-call]
    if reduction == "none":
        return gather(loss, axis_of(sp_group, "sequence")) if gather_sequence_loss else loss
    total, tokens = loss.sum(), (target != ignore_index).sum().to(loss.dtype)
    if sp_group is not None:
        axis = axis_of(sp_group, "sequence")
        everywhere = all_reduce_sum(torch.stack((total.detach(), tokens)), axis, "loss and number of tokens")
        total, tokens = total + (everywhere[0] - total.detach()), everywhere[1]
    return total if reduction == "sum" else total / tokens.clamp(min=1)


def _part(logits: Tensor, tensor: Axis | None, start: int | None, end: int | None) -> tuple[int, int]:
    """Where the vocabulary of this process begins, and the size of the whole."""
    here = logits.shape[-1]
    if here == 0:
        raise ValueError("vocab_parallel_logits must contain at least one local vocabulary entry")
    if tensor is None:
        if (start or 0, here if end is None else end) != (0, here):
            raise ValueError("Vocabulary shard bounds must cover the complete local vocabulary when TP is disabled")
        return 0, here
    mine = torch.tensor([[-1 if start is None else start, here]], device=logits.device)
    parts = gather_whole(mine, tensor, 0, "parts of the vocabulary").tolist()
    if start is None:
        if len({size for _, size in parts}) > 1:
            raise ValueError("Explicit vocabulary shard bounds are required for uneven tensor-parallel shards")
        return tensor.rank * here, tensor.world_size * here
    expected = 0
    for first, size in parts:
        if first != expected:
            raise ValueError("Vocabulary shard bounds must form a contiguous, non-overlapping partition starting at 0")
        expected += size
    if end != start + here:
        raise ValueError(f"Vocabulary shard bounds {start}:{end} do not match the local vocabulary size {here}")
    return start, expected


class _CrossEntropy(torch.autograd.Function):
    """log(sum(exp(logits))) - logits[target], with sums over the processes that hold parts of the vocabulary."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, target: Tensor, tensor: Axis | None, start: int, ignored: int) -> Tensor:
        logits = given.float() if given.dtype in (torch.float16, torch.bfloat16) else given
        highest = logits.amax(-1)
        if tensor is not None:
            highest = all_reduce_max(highest, tensor, "largest logits")
        powers = torch.exp(logits - highest.unsqueeze(-1))
        counts = target != ignored
        here = counts & (target >= start) & (target < start + logits.shape[-1])
        index = (target - start).clamp(0, logits.shape[-1] - 1).unsqueeze(-1)
        sums = torch.stack((powers.sum(-1), torch.where(here, logits.gather(-1, index).squeeze(-1), 0.0)))
        if tensor is not None:
            sums = all_reduce_sum(sums, tensor, "sums of the softmax")
        ctx.save_for_backward(powers.div_(sums[0].unsqueeze(-1)), index, here, counts)
        ctx.dtype = given.dtype
        return torch.where(counts, sums[0].log() + highest - sums[1], 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        softmax, index, here, counts = ctx.saved_tensors
        found = softmax.scatter_add(-1, index, -here.unsqueeze(-1).to(softmax.dtype))
        return (found * (counts * grad).unsqueeze(-1)).to(ctx.dtype), None, None, None, None


class _GatherSlices(torch.autograd.Function):
    """A gather along dimension 0 whose gradient is the slice of this process."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, axis: Axis) -> Tensor:
        ctx.rank, ctx.length = axis.rank, local.shape[0]
        return gather_whole(local, axis, 0, "loss").clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad.narrow(0, ctx.rank * ctx.length, ctx.length), None
