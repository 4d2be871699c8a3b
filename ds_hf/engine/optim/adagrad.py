"""Adagrad under DeepSpeed's name, with torch.optim.Adagrad's numerics and state (``step``, ``sum``).

``FusedAdagrad`` takes everything torch's class takes; ``DeepSpeedCPUAdagrad`` has DeepSpeed's signature.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from ds_hf.engine.ops import library as ops
from ds_hf.engine.optim.base import StreamingOptimizer, advance, alike, next_seed, rate_of

__all__ = ["DeepSpeedCPUAdagrad", "FusedAdagrad", "adagrad_update"]


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

    def _dense(self, group: dict[str, Any], grad: Any) -> Tensor:
        """A gradient of zero moves nothing here, so that a sparse one may be filled up; but for the weight decay."""
        if grad.is_sparse and not group["weight_decay"]:
            return grad.to_dense()  # type: ignore[no-any-return]
        return super()._dense(group, grad)

    def _update(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        outs: list[Tensor],
        scale_and_skip: Tensor | None,
    ) -> None:
        states = [self._init_state(param, ("sum",), group["initial_accumulator_value"]) for param in params]
        advance(states, scale_and_skip)
        seed = next_seed(group, params, self.stochastic_rounding)
        adagrad_update(group, params, grads, outs, states, scale_and_skip, seed)


def adagrad_update(
    group: dict[str, Any],
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    outs: Sequence[Tensor],
    states: Sequence[dict[str, Any]],
    scale_and_skip: Tensor | None,
    seed: int | None = None,
) -> None:
    """Adagrad over torch's names of states and groups; the step is counted already."""
    columns = [[state[key] for state in states] for key in ("sum", "step")]
    for work, gradients, sums, steps, copies in alike([params, grads, *columns, outs]):
        ops.adagrad_(
            work,
            gradients,
            sums,
            copies,
            steps,
            scale_and_skip,
            lr=rate_of(group, work[0].device),
            lr_decay=group["lr_decay"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            seed=seed,
        )


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
