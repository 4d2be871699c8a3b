"""Adagrad under DeepSpeed's name, with torch.optim.Adagrad's numerics and state (``step``, ``sum``).

``FusedAdagrad`` takes everything torch's class takes; ``DeepSpeedCPUAdagrad`` has DeepSpeed's signature.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ds_hf.engine.optim.base import StreamingOptimizer, in_state_dtype, write_back

__all__ = ["DeepSpeedCPUAdagrad", "FusedAdagrad"]


class FusedAdagrad(StreamingOptimizer):
    """Adagrad with step-dependent ``lr_decay``, wherever the params are."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        fp32_optimizer_states: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "eps": eps,
        }
        for key, value in defaults.items():
            if not value >= 0.0:
                raise ValueError(f"{key} must not be negative, got {value}")
        super().__init__(params, defaults, fp32_optimizer_states=fp32_optimizer_states)

    def _update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        states = [self._init_state(param, ("sum",), group["initial_accumulator_value"]) for param in params]
        sums = [state["sum"] for state in states]
        work = in_state_dtype(params, sums)
        grads = in_state_dtype(grads, sums)
        torch._foreach_add_([state["step"] for state in states], 1)
        if group["weight_decay"]:
            grads = list(torch._foreach_add(grads, work, alpha=group["weight_decay"]))
        torch._foreach_addcmul_(sums, grads, grads, 1.0)
        denominators = torch._foreach_sqrt(sums)
        torch._foreach_add_(denominators, group["eps"])
        torch._foreach_addcdiv_(work, grads, denominators, _rates(group, states))
        write_back(params, work)


class DeepSpeedCPUAdagrad(FusedAdagrad):
    """The class that DeepSpeed and accelerate construct for offloaded Adagrad."""

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if amsgrad:
            raise ValueError("DeepSpeedCPUAdagrad does not support amsgrad=True; remove it")
        super().__init__(
            model_params, lr=lr, weight_decay=weight_decay, eps=eps, fp32_optimizer_states=fp32_optimizer_states
        )


def _rates(group: dict[str, Any], states: list[dict[str, Any]]) -> list[float]:
    """The (negated) rate of each param; reads ``step`` back from the device only when ``lr_decay`` needs it."""
    lr, decay = float(group["lr"]), group["lr_decay"]
    if not decay:
        return [-lr] * len(states)
    return [-lr / (1 + (float(state["step"]) - 1) * decay) for state in states]
