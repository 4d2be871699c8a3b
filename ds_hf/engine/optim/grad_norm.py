"""The global L2 norm of sharded gradients, and the one coefficient that unscales and clips them.

Sums of squares are taken in fp32 over what each rank owns; one all-reduce of one number over all processes follows,
unless each of them owns everything. What several own is divided by their number, so that each element counts once. Gaps
and padding of flat gradients are zero and add nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ds_hf.engine.dist import collectives
from ds_hf.engine.dist.mesh import Axis
from ds_hf.engine.ops import library as ops

__all__ = ["global_control", "shared"]


def shared(square: Tensor, owners: int) -> Tensor:
    """What each of so many processes that own the same adds to a sum over all."""
    return square if owners == 1 else square / owners


def global_control(
    owned: Sequence[Tensor],
    world: Axis,
    *,
    alone: bool,
    device: torch.device,
    owners: Sequence[int],
    known: Sequence[Tensor] = (),
    scale: float = 1.0,
    max_norm: float = 0.0,
    checked: bool = False,
) -> Tensor:
    """fp32 ``[3]``: factor that unscales and clips, flag that forbids the step, norm of all gradients as they are.

    The norm is inf or nan if any gradient on any rank is.

    Args:
        owned: what this rank owns, any floating dtypes ...
        owners: ... and how many processes of the world own the same.
        world: all processes that own something of the model.
        alone: every rank owns everything, so there is nothing to sum over ranks.
        device: where the result lies, and where the processes of ``world`` meet.
        known: squared norms of what else this rank owns, divided by the number of their owners.
        scale: the gradients carry this loss scale.
        max_norm: ``gradient_clipping``, of the gradients without it; 0 for none.
        checked: forbid the step when the norm is not finite.
    """
    clip: dict[str, Any] = {"scale": scale, "max_norm": max_norm, "checked": checked}
    kinds: dict[tuple[int, torch.device, torch.dtype], list[Tensor]] = {}
    for tensor, count in zip(owned, owners, strict=True):
        kinds.setdefault((1 if alone else count, tensor.device, tensor.dtype), []).append(tensor)
    if alone and len(kinds) == 1 and not known:
        return ops.norm_control(next(iter(kinds.values())), **clip).to(device)
    squares = [shared(ops.squared_norm(tensors).to(device), count) for (count, _, _), tensors in kinds.items()]
    for place in dict.fromkeys(square.device for square in known):
        squares.append(torch.stack([square for square in known if square.device == place]).sum().to(device))
    if not alone:
        total = torch.stack(squares).sum() if squares else torch.zeros((), device=device)
        squares = [collectives.all_reduce_sum(total, world, "the gradient norm")]
    return ops.clip_control(squares or [torch.zeros((), device=device)], **clip)
