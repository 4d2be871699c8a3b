"""``deepspeed.runtime.chunked_cross_entropy``: cross entropy without fp32 copies of all logits.

``"ds_hf": {"chunked_loss": true}`` goes further: there the logits themselves do not exist.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, nn

from ds_hf.engine.modules.tiling.loss import causal_lm_loss, rows_cross_entropy

__all__ = [
    "BACKENDS",
    "ChunkedCausalLMLoss",
    "chunked_cross_entropy",
    "install_chunked_causal_lm_loss",
    "triton_backend_available",
]

BACKENDS = ("auto", "triton", "torch")


def triton_backend_available() -> bool:
    """Whether there is a Triton kernel for it: no, "auto" takes torch's operators everywhere."""
    return False


def chunked_cross_entropy(
    logits: Tensor,
    target: Tensor,
    ignore_index: int = -100,
    reduction: str = "mean",
    block_rows: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """``torch.nn.functional.cross_entropy(logits.float(), target, ...)``, some rows at a time.

    Args:
        logits: ``[rows, vocabulary]``. target: ``[rows]``, int64.
        reduction: "mean" divides by the rows that are not ignored; "sum"; "none".
        block_rows: rows in one step; default as many as are 512 MiB in fp32.
        backend: "auto" or "torch".

    Raises:
        ValueError: shapes that do not belong together, another reduction or backend, ``block_rows`` below 1.
        TypeError: ``block_rows`` is no integer.
        RuntimeError: the target is not int64 or out of range, or the backend "triton" is asked for.
    """
    block_rows = _checked(block_rows, backend)
    if logits.dim() != 2 or target.shape != logits.shape[:1]:
        raise ValueError(
            f"Expected [rows, vocab] logits and [rows] targets, got {tuple(logits.shape)} and {tuple(target.shape)}"
        )
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f"Unsupported reduction: {reduction!r}")
    if target.dtype != torch.long:
        raise RuntimeError(f"Expected torch.long class-index targets, got {target.dtype}")
    target = target.to(logits.device)
    counted = target != ignore_index
    fits = ~(counted & ((target < 0) | (target >= logits.shape[-1]))).any()
    torch._assert_async(fits, f"Target is out of range for vocabulary size {logits.shape[-1]}")
    losses = rows_cross_entropy(logits, target, ignore_index=ignore_index, rows=block_rows)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / counted.sum()


class ChunkedCausalLMLoss:
    """Takes the place of transformers' ``ForCausalLMLoss``: the same shift, ignored labels and division."""

    def __init__(self, block_rows: int | None = None, backend: str = "auto") -> None:
        self.block_rows, self.backend = _checked(block_rows, backend), backend

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | float | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The loss, ``[]`` in fp32."""
        return causal_lm_loss(
            logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, self.block_rows
        )


def install_chunked_causal_lm_loss(
    model: nn.Module, block_rows: int | None = None, backend: str = "auto"
) -> ChunkedCausalLMLoss:
    """Have a causal language model of transformers compute its loss with ``ChunkedCausalLMLoss``, which is returned.

    Raises:
        ValueError: the model's ``loss_function`` is not transformers' ``ForCausalLMLoss``, or cannot be replaced.
    """
    from transformers.loss.loss_utils import ForCausalLMLoss

    given = getattr(model, "loss_function", None)
    found = getattr(given, "__wrapped__", given)  # an engine may compute it another way
    if found is not ForCausalLMLoss:
        raise ValueError(
            "install_chunked_causal_lm_loss only replaces the stock Hugging Face ForCausalLMLoss, but this model's "
            f"loss_function is {found!r}"
        )
    loss = ChunkedCausalLMLoss(block_rows, backend)
    fault = "Unable to install the chunked causal-LM loss: the model's loss_function is not writable"
    try:
        setattr(model, "loss_function", loss)  # noqa: B010  no attribute of every nn.Module
    except (AttributeError, TypeError) as error:
        raise ValueError(fault) from error
    written: object = model.loss_function
    if written is not loss:
        raise ValueError(fault)
    return loss


def _checked(block_rows: int | None, backend: str) -> int | None:
    if backend not in BACKENDS:
        raise ValueError(f"Unsupported chunked cross-entropy backend {backend!r}; expected one of {BACKENDS}")
    if backend == "triton":
        raise RuntimeError('The Triton chunked cross-entropy backend is not available here; use backend="torch"')
    if block_rows is None:
        return None
    try:
        block_rows = operator.index(block_rows)
    except TypeError as error:
        raise TypeError("block_rows must be a positive integer or None") from error
    if block_rows <= 0:
        raise ValueError(f"block_rows must be a positive integer or None, got {block_rows}")
    return block_rows
