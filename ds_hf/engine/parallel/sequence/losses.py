"""Losses over the parts of a sequence: gathered with the true adjoint, and their mean over tokens.

Every process gives ``backward`` the loss of the whole sequence. The adjoint of a gather is then the sum of what all of
them send back, so gradients are as many times too large as there are processes; the engine's mean over data x sequence
makes them right (``zero/replicas.py``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ds_hf.engine.comm.collectives import all_gather, all_reduce_sum
from ds_hf.engine.comm.mesh import Axis

__all__ = ["gather", "gather_whole", "mean_over_tokens"]


def gather_whole(local: Tensor, axis: Axis, dim: int, what: str) -> Tensor:
    """The parts of all processes joined along ``dim``: ``[..., n, ...]`` -> ``[..., n * processes, ...]``; no
    gradient."""
    if axis.world_size == 1:
        return local
    if local.dtype is torch.bool:
        return gather_whole(local.to(torch.uint8), axis, dim, what).bool()
    shard = local.movedim(dim, 0).contiguous()
    full = shard.new_empty((axis.world_size * shard.shape[0], *shard.shape[1:]))
    all_gather(full.view(-1), shard.view(-1), axis, what)
    return full.movedim(0, dim)


def gather(local: Tensor, axis: Axis, *, dim: int = 0, what: str = "loss") -> Tensor:
    """``gather_whole`` with its gradient: the sum over processes of what each sends back to this part."""
    whole: Tensor = _Gather.apply(local, axis, dim, what)  # type: ignore[no-untyped-call]
    return whole


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, axis: Axis, dim: int, what: str) -> Tensor:
        ctx.axis, ctx.dim, ctx.what, ctx.length = axis, dim, what, local.shape[dim]
        return gather_whole(local, axis, dim, what).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        total = all_reduce_sum(grad.contiguous().clone(), ctx.axis, f"gradient of the {ctx.what}")
        return total.narrow(ctx.dim, ctx.axis.rank * ctx.length, ctx.length), None, None, None


def mean_over_tokens(loss: Tensor, tokens: Tensor, axis: Axis) -> Tensor:
    """The mean over all tokens of a sequence, of the mean over this process's ``tokens``; differentiable.

    Args:
        loss: 0-dim; it may be NaN where ``tokens`` is 0, as the mean over nothing is.
        tokens: 0-dim integers: how many tokens of this process count.

    Returns:
        0-dim, the same on all processes of the axis.
    """
    losses = gather(loss.reshape(1), axis, what="loss")
    counts = gather_whole(tokens.reshape(1), axis, 0, "number of tokens")
    known = torch.where(counts > 0, losses, torch.zeros_like(losses))
    return (known * counts).sum() / counts.sum().clamp(min=1)
