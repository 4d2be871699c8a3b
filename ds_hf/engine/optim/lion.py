"""Lion (Chen et al. 2023, https://arxiv.org/abs/2302.06675) under DeepSpeed's two class names.

One momentum, an update of sign(interpolation), decoupled weight decay. State: ``step``, ``exp_avg``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from ds_hf.engine.ops import library as ops
from ds_hf.engine.optim.base import StreamingOptimizer, advance, alike, next_seed, rate_of

__all__ = ["DeepSpeedCPULion", "FusedLion"]


class _Lion(StreamingOptimizer):
    """The rule; see the two public classes for the arguments."""

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        fp32_optimizer_states: bool,
    ) -> None:
        if not (0.0 <= betas[0] < 1.0 and 0.0 <= betas[1] < 1.0):
            raise ValueError(f"betas must both be in [0, 1), got {betas}")
        if not (lr >= 0.0 and weight_decay >= 0.0):
            raise ValueError(f"lr and weight_decay must not be negative, got lr={lr}, weight_decay={weight_decay}")
        defaults = {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay}
        super().__init__(params, defaults, fp32_optimizer_states=fp32_optimizer_states)

    def _update(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        outs: list[Tensor],
        scale_and_skip: Tensor | None,
    ) -> None:
        states = [self._init_state(param, ("exp_avg",)) for param in params]
        advance(states, scale_and_skip)
        beta1, beta2 = group["betas"]
        seed = next_seed(group, params, self.stochastic_rounding)
        for work, gradients, exp_avgs, copies in alike([params, grads, [s["exp_avg"] for s in states], outs]):
            ops.lion_(
                work,
                gradients,
                exp_avgs,
                copies,
                scale_and_skip,
                lr=rate_of(group, work[0].device),
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                seed=seed,
            )


class FusedLion(_Lion):
    """Lion wherever the params are; DeepSpeed's name for its GPU class."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        self.set_grad_none = set_grad_none
        super().__init__(params, lr, betas, weight_decay, fp32_optimizer_states=False)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear gradients; ``None`` means as ``set_grad_none`` says."""
        super().zero_grad(set_to_none=self.set_grad_none if set_to_none is None else set_to_none)


class DeepSpeedCPULion(_Lion):
    """Lion wherever the params are; DeepSpeed's name for its CPU class."""

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(model_params, lr, betas, weight_decay, fp32_optimizer_states)
