"""What 1-bit optimizers do around their exchange, in one pass each: here in plain torch, on the CPU by its library.

Lists have one entry a parameter: fp32, contiguous and of equal sizes but for ``grads`` and ``outs``, which may have 16
bits. ``floors`` are fp32 scalars, least values of the second moments. The *size* of an element is the root of its
second moment plus eps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_hf.engine.ops import cpu_onebit

__all__ = ["Sizes", "apply_means_", "to_values_"]


@dataclass(frozen=True)
class Sizes:
    """What sizes are made of.

    Attributes:
        seconds: second moments; floors: their least values, each.
    """

    seconds: Sequence[Tensor]
    floors: Sequence[Tensor]
    eps: float
    eps_inside_sqrt: bool = False

    def __getitem__(self, index: int) -> Tensor:
        """Of the entry ``index``."""
        floored = self.seconds[index].clamp(min=self.floors[index])
        return floored.add_(self.eps).sqrt_() if self.eps_inside_sqrt else floored.sqrt_().add_(self.eps)


def to_values_(
    values: Sequence[Tensor],
    momenta: Sequence[Tensor],
    grads: Sequence[Tensor],
    sizes: Sizes,
    scale_and_skip: Tensor | None,
    *,
    beta1: float,
) -> None:
    """Move the momenta, fp32 and flat, by the gradients, times ``scale_and_skip[0]``; ``values`` become momenta over
    sizes."""
    if _on_cpu(momenta):
        numbers = cpu_onebit.Numbers(0, beta1, sizes.eps, 0, sizes.eps_inside_sqrt)
        cpu_onebit.values_(values, grads, momenta, sizes.seconds, sizes.floors, scale_and_skip, numbers)
        torch.autograd.graph.increment_version([*values, *momenta])
        return
    for index, (value, momentum, grad) in enumerate(zip(values, momenta, grads, strict=True)):
        wide = grad.float() if scale_and_skip is None else grad.float() * scale_and_skip[0]
        torch.div(momentum.lerp_(wide, 1 - beta1), sizes[index], out=value)


def apply_means_(
    params: Sequence[Tensor],
    momenta: Sequence[Tensor],
    outs: Sequence[Tensor],
    means: Sequence[Tensor],
    sizes: Sizes,
    *,
    lr: float,
    weight_decay: float,
) -> None:
    """A step of flat ``params`` (and ``outs``, their bf16 or fp16 copies, or none) by ``means`` with decoupled weight
    decay; the momenta become means times sizes."""
    if _on_cpu(momenta):
        numbers = cpu_onebit.Numbers(lr, 0, sizes.eps, weight_decay, sizes.eps_inside_sqrt)
        cpu_onebit.apply_(params, means, momenta, sizes.seconds, outs, sizes.floors, numbers)
        torch.autograd.graph.increment_version([*params, *momenta, *outs])
        return
    for index, (param, momentum, mean) in enumerate(zip(params, momenta, means, strict=True)):
        param.mul_(1 - lr * weight_decay).add_(mean, alpha=-lr)
        torch.mul(mean, sizes[index], out=momentum)
    for param, out in zip(params, outs, strict=bool(outs)):
        out.copy_(param)


def _on_cpu(momenta: Sequence[Tensor]) -> bool:
    return momenta[0].device.type == "cpu" and cpu_onebit.available() is None
