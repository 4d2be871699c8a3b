"""Adam and AdamW under DeepSpeed's two class names, over the kernels of ``engine.ops``.

``FusedAdam`` and ``DeepSpeedCPUAdam`` are one rule with two signatures; both run wherever their params are. Weight
decay is decoupled by default (``adam_w_mode``), as in DeepSpeed. State is torch.optim.AdamW's: ``step``, ``exp_avg``,
``exp_avg_sq``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from ds_hf.engine.ops import library as ops
from ds_hf.engine.optim.base import StreamingOptimizer, advance, alike, next_seed, rate_of

__all__ = ["DeepSpeedCPUAdam", "FusedAdam", "adam_update"]


class _Adam(StreamingOptimizer):
    """The rule; see the two public classes for the arguments.

    Attributes:
        adam_w_mode: True for decoupled weight decay (AdamW), False for decay added to the gradient (Adam).
    """

    def __init__(
        self, params: ParamsT, defaults: dict[str, Any], adam_w_mode: bool, fp32_optimizer_states: bool
    ) -> None:
        _check_adam(defaults)
        self.adam_w_mode = bool(adam_w_mode)
        super().__init__(params, defaults, fp32_optimizer_states=fp32_optimizer_states)

    def _update(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        outs: list[Tensor],
        scale_and_skip: Tensor | None,
    ) -> None:
        states = [self._init_state(param, ("exp_avg", "exp_avg_sq")) for param in params]
        advance(states, scale_and_skip)
        seed = next_seed(group, params, self.stochastic_rounding)
        adam_update(group, params, grads, outs, states, scale_and_skip, decoupled=self.adam_w_mode, seed=seed)


def adam_update(
    group: dict[str, Any],
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    outs: Sequence[Tensor],
    states: Sequence[dict[str, Any]],
    scale_and_skip: Tensor | None,
    *,
    decoupled: bool,
    seed: int | None = None,
) -> None:
    """Adam over torch's names of states and groups; the step is counted already."""
    columns = [[state[key] for state in states] for key in ("exp_avg", "exp_avg_sq", "step")]
    beta1, beta2 = group["betas"]
    for call in alike([params, grads, *columns, outs]):
        work, gradients, exp_avgs, exp_avg_sqs, steps, copies = call
        ops.adam_(
            work,
            gradients,
            exp_avgs,
            exp_avg_sqs,
            copies,
            steps,
            scale_and_skip,
            lr=rate_of(group, work[0].device),
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=decoupled,
            bias_correction=group.get("bias_correction", True),
            seed=seed,
        )


class FusedAdam(_Adam):
    """Adam (``adam_w_mode=False``) or AdamW in one pass over each tensor, on CPU or GPU."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        defaults = _defaults(lr, bias_correction, betas, eps, weight_decay, amsgrad)
        self.set_grad_none = set_grad_none
        super().__init__(params, defaults, adam_w_mode, fp32_optimizer_states=False)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear gradients; ``None`` means as ``set_grad_none`` says."""
        super().zero_grad(set_to_none=self.set_grad_none if set_to_none is None else set_to_none)


class DeepSpeedCPUAdam(_Adam):
    """The class that DeepSpeed and accelerate construct for offloaded optimizer states."""

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        defaults = _defaults(lr, bias_correction, betas, eps, weight_decay, amsgrad)
        super().__init__(model_params, defaults, adamw_mode, fp32_optimizer_states)


def _defaults(
    lr: float, bias_correction: bool, betas: tuple[float, float], eps: float, weight_decay: float, amsgrad: bool
) -> dict[str, Any]:
    return {
        "lr": lr,
        "betas": tuple(betas),  # JSON gives a list; state dicts and schedulers expect torch's tuple
        "eps": eps,
        "weight_decay": weight_decay,
        "bias_correction": bias_correction,
        "amsgrad": amsgrad,
    }


def _check_adam(defaults: dict[str, Any]) -> None:
    beta1, beta2 = defaults["betas"]
    if not (0.0 <= beta1 < 1.0 and 0.0 <= beta2 < 1.0):
        raise ValueError(f"betas must both be in [0, 1), got {defaults['betas']}")
    for key in ("lr", "eps", "weight_decay"):
        if not defaults[key] >= 0.0:
            raise ValueError(f"{key} must not be negative, got {defaults[key]}")
