"""Cross entropy of logits whose tokens, and perhaps whose vocabulary, are divided:
``deepspeed.sequence.cross_entropy``."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hf.deepspeed_api import groups
from ds_hf.engine.comm.collectives import all_reduce_max, all_reduce_sum
from ds_hf.engine.comm.mesh import Axis, axis_of
from ds_hf.engine.parallel.sequence.losses import gather, gather_whole
from ds_hf.log import warn_once

__all__ = [
    "VocabParallelCausalLMLoss",
    "VocabParallelCrossEntropyLoss",
    "configure_vocab_parallel_loss",
    "validate_vocab_parallel_loss",
    "vocab_parallel_cross_entropy",
    "vocab_sequence_parallel_cross_entropy",
]

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

    A "mean" or "sum" over ``sp_group`` has the gradient of this process's tokens alone, as DeepSpeed's, which fits
    gradients that are summed over the sequence; for an engine that averages them it is as many times larger.

    Args:
        vocab_parallel_logits: ``[tokens, ..., vocabulary / tp]``; target: ``[tokens, ...]``, indices of the whole one.
        vocab_start_index, vocab_end_index: the part that is here; default equal parts in the order of the ranks.
        global_vocab_size: the whole vocabulary, where the bounds are known to fit: they are compared otherwise, with a
            collective.
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
    tensor = _tensor_axis(tp_group)
    if global_vocab_size is None:
        start, whole = _part(vocab_parallel_logits, tensor, vocab_start_index, vocab_end_index)
    elif vocab_start_index is None:
        raise ValueError("global_vocab_size requires explicit vocab_start_index and vocab_end_index")
    else:
        start, whole = vocab_start_index, global_vocab_size
    if bool(((target != ignore_index) & ((target < 0) | (target >= whole))).any()):
        raise ValueError(f"Target is out of range for vocabulary size {whole}")
    loss: Tensor = _CrossEntropy.apply(vocab_parallel_logits, target.long(), tensor, start, ignore_index)  # type: ignore[no-untyped-call]
    if reduction == "none":
        return gather(loss, axis_of(sp_group, "sequence")) if gather_sequence_loss else loss
    total, tokens = loss.sum(), (target != ignore_index).sum().to(loss.dtype)
    if sp_group is not None:
        axis = axis_of(sp_group, "sequence")
        everywhere = all_reduce_sum(torch.stack((total.detach(), tokens)), axis, "loss and number of tokens")
        mine = total * axis.world_size if groups.averages_sequence() else total
        total, tokens = mine + (everywhere[0] - mine.detach()), everywhere[1]
    return total if reduction == "sum" else total / tokens.clamp(min=1)


class VocabParallelCrossEntropyLoss(nn.Module):
    """``vocab_parallel_cross_entropy`` as a module, with its arguments but logits and targets."""

    def __init__(
        self,
        tp_group: Group = None,
        sp_group: Group = None,
        vocab_start_index: int | None = None,
        vocab_end_index: int | None = None,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        gather_sequence_loss: bool = False,
        backend: Literal["torch", "liger"] = "torch",
    ) -> None:
        super().__init__()
        self.tp_group, self.sp_group = tp_group, sp_group
        self.vocab_start_index, self.vocab_end_index = vocab_start_index, vocab_end_index
        self.ignore_index, self.reduction = ignore_index, reduction
        self.gather_sequence_loss, self.backend = gather_sequence_loss, backend

    def forward(self, vocab_parallel_logits: Tensor, target: Tensor) -> Tensor:
        """The loss of ``[tokens, ..., vocabulary / tp]`` for ``[tokens, ...]``."""
        return vocab_parallel_cross_entropy(
            vocab_parallel_logits,
            target,
            self.tp_group,
            self.sp_group,
            self.vocab_start_index,
            self.vocab_end_index,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            gather_sequence_loss=self.gather_sequence_loss,
            backend=self.backend,
        )


class VocabParallelCausalLMLoss:
    """The ``loss_function`` of a causal language model of transformers whose head gives a part of the vocabulary.

    The bounds of the parts are compared over ``tp_group`` in the first call; an object is for one head.

    Args:
        sp_group: the processes that share sequences, where nothing else joins their losses. Under the Trainer and
            accelerate's loops it stays ``None``.
        others: see ``vocab_parallel_cross_entropy``.
    """

    def __init__(
        self,
        tp_group: Group = None,
        sp_group: Group = None,
        vocab_start_index: int | None = None,
        vocab_end_index: int | None = None,
        ignore_index: int = -100,
        backend: Literal["torch", "liger"] = "torch",
    ) -> None:
        self.tp_group, self.sp_group = tp_group, sp_group
        self.vocab_start_index, self.vocab_end_index = vocab_start_index, vocab_end_index
        self.ignore_index, self.backend = ignore_index, backend
        self._known: tuple[Any, int] | None = None  # what the bounds were compared for, and the whole vocabulary

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None = None,
        vocab_size: int | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The loss, ``[]`` in fp32: the mean over tokens, or their sum by ``num_items_in_batch``.

        Args:
            logits: ``[..., tokens, vocabulary / tp]``; labels: ``[..., tokens]``, of the tokens themselves;
            shift_labels: of the next tokens, where they are shifted already.
            vocab_size: what the caller takes the whole vocabulary for; the head's own counts.

        Raises:
            ValueError: neither kind of labels, or see ``vocab_parallel_cross_entropy``.
            RuntimeError: bounds or size of the part are others than in the first call.
        """
        if shift_labels is None:
            if labels is None:
                raise ValueError("labels or shift_labels must be provided")
            logits, shift_labels = logits[..., :-1, :], labels[..., 1:]
        whole = self._whole(logits)
        if vocab_size is not None and vocab_size != whole:
            warn_once(f"the head has a vocabulary of {whole}, and the model says {vocab_size}: the head's counts")
        loss = vocab_parallel_cross_entropy(
            logits,
            shift_labels,
            self.tp_group,
            self.sp_group,
            self.vocab_start_index,
            self.vocab_end_index,
            whole,
            self.ignore_index,
            "mean" if num_items_in_batch is None else "sum",
            backend=self.backend,
        )
        if num_items_in_batch is None:
            return loss
        return loss / torch.as_tensor(num_items_in_batch, device=loss.device, dtype=loss.dtype).clamp(min=1)

    def _whole(self, logits: Tensor) -> int:
        here = logits.shape[-1]
        if self._known is None:
            start, whole = _part(logits, _tensor_axis(self.tp_group), self.vocab_start_index, self.vocab_end_index)
            self.vocab_start_index, self.vocab_end_index = start, start + here
            self._known = (self._bounds(here), whole)
        elif self._known[0] != self._bounds(here):
            raise RuntimeError(
                "the part of the vocabulary is another than in the first call of this VocabParallelCausalLMLoss: make "
                "one for each head"
            )
        return self._known[1]

    def _bounds(self, here: int) -> tuple[Any, ...]:
        return self.tp_group, here, self.vocab_start_index, self.vocab_end_index


def configure_vocab_parallel_loss(
    model: nn.Module,
    vocab_parallel_head: Any,
    sp_group: Group = None,
    ignore_index: int = -100,
    backend: Literal["torch", "liger"] = "torch",
) -> nn.Module:
    """Have a causal language model of transformers compute its loss from a part of the logits; its own is kept as
    ``_deepspeed_original_loss_function``.

    Args:
        vocab_parallel_head: with ``mp_group``, ``vocab_start_index`` and ``vocab_end_index``.
        others: see ``VocabParallelCausalLMLoss``.

    Returns:
        ``model``.

    Raises:
        ValueError: its ``loss_function`` cannot be replaced.
    """
    head = vocab_parallel_head
    loss = VocabParallelCausalLMLoss(
        head.mp_group, sp_group, head.vocab_start_index, head.vocab_end_index, ignore_index, backend
    )
    before = _replace_loss(model, loss)
    if not hasattr(model, "_deepspeed_original_loss_function"):
        model._deepspeed_original_loss_function = before
    return model


def validate_vocab_parallel_loss(model: nn.Module) -> None:
    """Whether the loss of ``model`` can be replaced; it stays as it is.

    Raises:
        ValueError: it cannot be.
    """
    model.loss_function = _replace_loss(model, VocabParallelCausalLMLoss())


def _replace_loss(model: nn.Module, loss: Any) -> Any:
    """The loss that was there.

    Raises:
        ValueError: it is still there, or there is none.
    """
    if not hasattr(model, "loss_function"):
        raise ValueError(
            f"{type(model).__name__} has no loss_function that could be replaced: gather the logits of all parts "
            "(gather_output=True) and compute the loss from them"
        )
    before = model.loss_function
    submodule = model._modules.pop("loss_function", None)  # else only modules could take its place
    try:
        model.loss_function = loss
        if model.loss_function is loss:
            return before
        model.loss_function = before
    except (AttributeError, TypeError):
        pass
    if submodule is not None:
        model._modules["loss_function"] = submodule
    raise ValueError(
        f"the loss_function of {type(model).__name__} cannot be replaced: gather the logits of all parts "
        "(gather_output=True) and compute the loss from them"
    )


def _tensor_axis(group: Group) -> Axis | None:
    return None if group is None or dist.get_world_size(group) == 1 else axis_of(group, "tensor")


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
