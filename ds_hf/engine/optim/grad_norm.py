"""The global L2 norm of sharded gradients, and the one coefficient that unscales and clips them.

Sums of squares are taken in fp32 over what each rank owns; one all-reduce of one number follows where the plan
shards. Gaps and padding of flat gradients are zero and add nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_hf.engine.dist import collectives
from ds_hf.engine.dist.mesh import Axis
from ds_hf.engine.ops import library as ops

__all__ = ["clip_coefficient", "global_norm"]


def global_norm(
    owned: Sequence[Tensor],
    axis: Axis,
    *,
    whole: bool,
    device: torch.device,
    axis_device: torch.device | None = None,
    known: Sequence[Tensor] = (),
) -> Tensor:
    """0-dim fp32 norm of all gradients; inf or nan if any gradient on any rank is.

    Args:
        owned: what this rank owns, any floating dtypes.
        whole: every rank owns everything, so there is nothing to sum over ranks.
        device: where the result lies.
        known: squared norms of what else this rank owns.
        axis_device: where the processes of ``axis`` meet, default ``device``: NCCL takes no offloaded tensor.
    """
    squares = torch.zeros((), dtype=torch.float32, device=device)
    if owned:
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for tensor in owned:
            kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
        squares = torch.stack([ops.squared_norm(tensors).to(device) for tensors in kinds.values()]).sum()
    for place in dict.fromkeys(square.device for square in known):
        squares = squares + torch.stack([square for square in known if square.device == place]).sum().to(device)
    if not whole:
        squares = collectives.all_reduce_sum(squares.to(axis_device or device), axis, "the gradient norm").to(device)
    return squares.sqrt()


def clip_coefficient(norm: Tensor, scale: float, max_norm: float) -> Tensor:
    """What gradients carrying ``scale`` are multiplied by: unscale, then clip to ``max_norm`` (0: no clipping).

    Clips as ``torch.nn.utils.clip_grad_norm_``: by ``max_norm / (norm + 1e-6)`` where that is below 1.
    """
    unscale = 1.0 / scale
    if max_norm <= 0:
        return torch.full_like(norm, unscale)
    return (max_norm / (norm * unscale + 1e-6)).clamp(max=1.0) * unscale
