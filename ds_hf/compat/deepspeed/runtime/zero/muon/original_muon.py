"""``deepspeed.runtime.zero.muon.original_muon``: Muon, and its and Adam's update of one tensor as functions.

The optimizers do not use the functions, which know no shards, no 16-bit parameters and no clipping. Every process
updates all matrices, so the classes for one device and for several are the same here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_hf.engine.optim.muon import Muon, MuonWithAuxAdam
from ds_hf.engine.optim.muon import Muon as SingleDeviceMuon
from ds_hf.engine.optim.muon import MuonWithAuxAdam as SingleDeviceMuonWithAuxAdam
from ds_hf.engine.optim.newton_schulz import (
    NS_METHODS,
    ns_compute_dtype,
    zeropower_via_gram_newtonschulz,
    zeropower_via_newtonschulz5,
)

__all__ = [
    "NS_METHODS",
    "Muon",
    "MuonWithAuxAdam",
    "SingleDeviceMuon",
    "SingleDeviceMuonWithAuxAdam",
    "adam_update",
    "muon_update",
    "ns_compute_dtype",
    "zeropower_via_gram_newtonschulz",
    "zeropower_via_newtonschulz5",
]


@torch.no_grad()
def muon_update(
    grad: Tensor,
    momentum: Tensor,
    beta: float = 0.95,
    ns_steps: int = 5,
    nesterov: bool = True,
    ns_method: str = "gram",
    is_expert_group: bool = False,
    num_heads: int | None = None,
) -> Tensor:
    """Muon's update, of ``grad``'s shape and dtype and still without the learning rate; ``momentum`` moves in place.

    A gradient that is not finite is returned as it is, and leaves the momentum alone.

    Args:
        is_expert_group: four dims are a batch of matrices, not a convolution.
        num_heads: make each of so many equal blocks of rows orthogonal by itself.
    """
    finite = grad.isfinite().all()
    momentum.copy_(torch.where(finite, momentum.lerp(grad, 1 - beta), momentum))
    update = grad.lerp(momentum, beta) if nesterov else momentum
    rows, columns = grad.shape[-2:]
    if num_heads is not None:
        if grad.dim() != 2 or num_heads < 1 or rows % num_heads:
            raise ValueError(
                f"the rows of a tensor of shape {tuple(grad.shape)} are not divisible by num_heads={num_heads}"
            )
        rows //= num_heads
        update = update.reshape(num_heads, rows, columns)
    elif grad.dim() == 4 and not is_expert_group:
        update = update.reshape(grad.shape[0], -1)
    iterate = zeropower_via_gram_newtonschulz if ns_method == "gram" else zeropower_via_newtonschulz5
    update = iterate(update, ns_steps) * max(1.0, rows / columns) ** 0.5
    return torch.where(finite, update.reshape(grad.shape).to(grad.dtype), grad)


@torch.no_grad()
def adam_update(grad: Tensor, buf1: Tensor, buf2: Tensor, step: int, betas: tuple[float, float], eps: float) -> Tensor:
    """Adam's update, still without the learning rate; the moments ``buf1`` and ``buf2`` move in place."""
    buf1.lerp_(grad, 1 - betas[0])
    buf2.lerp_(grad.square(), 1 - betas[1])
    return (buf1 / (1 - betas[0] ** step)) / ((buf2 / (1 - betas[1] ** step)).sqrt() + eps)
