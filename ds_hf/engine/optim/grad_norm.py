"""The global L2 norm of sharded gradients, and the one coefficient that unscales and clips them.

Sums of squares are taken in fp32 over what each rank owns; one all-reduce of one number follows where the plan
shards. Gaps and padding of flat gradients are zero and add nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ds_hf.engine.dist import collectives
from ds_hf.engine.dist.mesh import Axis
from ds_hf.engine.ops import library as ops

__all__ = ["global_control"]


def global_control(
    owned: Sequence[Tensor],
    axis: Axis,
    *,
    whole: bool,
    device: torch.device,
    known: Sequence[Tensor] = (),
    scale: float = 1.0,
    max_norm: float = 0.0,
    checked: bool = False,
) -> Tensor:
    """fp32 ``[3]``: factor that unscales and clips, flag that forbids the step, norm of all gradients as they are.

    The norm is inf or nan if any gradient on any rank is.

    Args:
        owned: what this rank owns, any floating dtypes.
        whole: every rank owns everything, so there is nothing to sum over ranks.
        device: where the result lies, and where the processes of ``axis`` meet.
        known: squared norms of what else this rank owns.
        scale: the gradients carry this loss scale.
        max_norm: ``gradient_clipping``, of the gradients without it; 0 for none.
        checked: forbid the step when the norm is not finite.
    """
    clip: dict[str, Any] = {"scale": scale, "max_norm": max_norm, "checked": checked}
    alone = whole or axis.world_size == 1
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in owned:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    if alone and len(kinds) == 1 and not known:
        return ops.norm_control(next(iter(kinds.values())), **clip).to(device)
    squares = [ops.squared_norm(tensors).to(device) for tensors in kinds.values()]
    for place in dict.fromkeys(square.device for square in known):
        squares.append(torch.stack([square for square in known if square.device == place]).sum().to(device))
    if not alone:
        total = torch.stack(squares).sum() if squares else torch.zeros((), device=device)
        squares = [collectives.all_reduce_sum(total, axis, "the gradient norm")]
    return ops.clip_control(squares or [torch.zeros((), device=device)], **clip)
