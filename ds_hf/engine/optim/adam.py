"""Adam and AdamW under DeepSpeed's two class names, over torch's fused kernels (CPU and CUDA).

``FusedAdam`` and ``DeepSpeedCPUAdam`` are one rule with two signatures; both run wherever their params are, so
neither needs a compiler. Weight decay is decoupled by default (``adam_w_mode``), as in DeepSpeed. State is
torch.optim.AdamW's: ``step``, ``exp_avg``, ``exp_avg_sq``.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ds_hf.engine.optim.base import StreamingOptimizer, in_state_dtype, write_back

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]


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

    def _update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        states = [self._init_state(param, ("exp_avg", "exp_avg_sq")) for param in params]
        exp_avgs = [state["exp_avg"] for state in states]
        exp_avg_sqs = [state["exp_avg_sq"] for state in states]
        steps = [state["step"] for state in states]
        work = in_state_dtype(params, exp_avgs)
        grads = in_state_dtype(grads, exp_avgs)
        torch._foreach_add_(steps, 1)
        rule = self._fused if group["bias_correction"] else self._uncorrected
        # One kernel call takes tensors of one device and dtype only.
        rows = sorted(zip(work, grads, exp_avgs, exp_avg_sqs, steps, strict=True), key=_kind)
        for _, alike in groupby(rows, key=_kind):
            columns = [list(column) for column in zip(*alike, strict=True)]
            rule(group, *columns)
        write_back(params, work)

    def _fused(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        steps: list[Tensor],
    ) -> None:
        kernel = torch._fused_adamw_ if self.adam_w_mode else torch._fused_adam_
        beta1, beta2 = group["betas"]
        kernel(
            params,
            grads,
            exp_avgs,
            exp_avg_sqs,
            [],
            steps,
            lr=float(group["lr"]),
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )

    def _uncorrected(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        steps: list[Tensor],
    ) -> None:
        """Without bias correction, which torch's kernels always apply."""
        lr, decay, (beta1, beta2) = float(group["lr"]), group["weight_decay"], group["betas"]
        if decay and self.adam_w_mode:
            torch._foreach_mul_(params, 1 - lr * decay)
        elif decay:
            grads = list(torch._foreach_add(grads, params, alpha=decay))
        torch._foreach_lerp_(exp_avgs, grads, 1 - beta1)
        torch._foreach_mul_(exp_avg_sqs, beta2)
        torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - beta2)
        denominators = torch._foreach_sqrt(exp_avg_sqs)
        torch._foreach_add_(denominators, group["eps"])
        torch._foreach_addcdiv_(params, exp_avgs, denominators, -lr)


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


def _kind(row: tuple[Tensor, ...]) -> tuple[str, str]:
    return str(row[0].device), str(row[0].dtype)
