"""Which optimizers can be stepped unit by unit, and which may be given shards of flattened params.

``streamed_update`` returns a function of (group, params, grads) that makes one step of only those params, or None
when only ``optimizer.step()`` over everything is known to be right. ``is_elementwise`` says whether an
optimizer treats each element alone, so that it does not matter how params are cut into shards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam

from ds_hf.engine.optim.base import StreamingOptimizer

__all__ = ["UnitUpdate", "is_elementwise", "streamed_update"]

UnitUpdate = Callable[[dict[str, Any], Sequence[Tensor], Sequence[Tensor]], None]

_ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.ASGD,
)


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the update of an element depends on that element's own gradient and state only.

    Exact torch classes and ds_hf's own; False for Adafactor, Muon, LBFGS, and everything unknown.
    """
    return isinstance(optimizer, StreamingOptimizer) or type(optimizer) in _ELEMENTWISE


def streamed_update(optimizer: torch.optim.Optimizer) -> UnitUpdate | None:
    """A function that steps some params of ``optimizer`` with given gradients, or None if it must step whole."""
    if _is_observed(optimizer):
        return None
    if isinstance(optimizer, StreamingOptimizer):
        return optimizer.update
    if not all(map(_is_ordinary, optimizer.param_groups)):
        return None
    if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
        return _torch_adam_update(optimizer)
    if type(optimizer) is torch.optim.Adagrad:
        return _torch_adagrad_update(optimizer)
    return None


def _is_observed(optimizer: torch.optim.Optimizer) -> bool:
    """Someone hooked or replaced ``step`` and expects it to be called (torch's schedulers only count calls)."""
    replaced = optimizer.__dict__.get("step")
    hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(hooked) or (replaced is not None and not hasattr(replaced, "_wrapped_by_lr_sched"))


def _is_ordinary(group: dict[str, Any]) -> bool:
    flags = ("amsgrad", "maximize", "differentiable", "capturable")
    tensors = (group["lr"], *group.get("betas", ()))
    return not any(group.get(flag) for flag in flags) and not any(isinstance(value, Tensor) for value in tensors)


def _torch_adam_update(optimizer: torch.optim.Optimizer) -> UnitUpdate:
    @torch.no_grad()
    def update(group: dict[str, Any], params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        # What torch's schedulers look at to know that a step was made.
        optimizer._opt_called = True  # type: ignore[attr-defined]
        if not params:
            return
        states = [_torch_adam_state(optimizer, group, param) for param in params]
        beta1, beta2 = group["betas"]
        adam(
            list(params),
            list(grads),
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            foreach=group["foreach"],
            fused=group["fused"],
            amsgrad=False,
            maximize=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            decoupled_weight_decay=group["decoupled_weight_decay"],
        )

    return update


def _torch_adam_state(optimizer: torch.optim.Optimizer, group: dict[str, Any], param: Tensor) -> dict[str, Any]:
    state: dict[str, Any] = optimizer.state[param]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=_step_device(group, param))
        state["exp_avg"] = torch.zeros_like(param)
        state["exp_avg_sq"] = torch.zeros_like(param)
    return state


def _torch_adagrad_update(optimizer: torch.optim.Optimizer) -> UnitUpdate:
    @torch.no_grad()
    def update(group: dict[str, Any], params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        optimizer._opt_called = True  # type: ignore[attr-defined]
        if not params:
            return
        states = [_torch_adagrad_state(optimizer, group, param) for param in params]
        adagrad(
            list(params),
            list(grads),
            [state["sum"] for state in states],
            [state["step"] for state in states],
            foreach=group["foreach"],
            fused=group["fused"],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            lr_decay=group["lr_decay"],
            eps=group["eps"],
            maximize=False,
        )

    return update


def _torch_adagrad_state(optimizer: torch.optim.Optimizer, group: dict[str, Any], param: Tensor) -> dict[str, Any]:
    """torch makes this state in its constructor, where the params were not shards yet."""
    state: dict[str, Any] = optimizer.state[param]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=_step_device(group, param))
        state["sum"] = torch.full_like(param, group["initial_accumulator_value"])
    return state


def _step_device(group: dict[str, Any], param: Tensor) -> torch.device:
    """torch keeps the counter on the host unless its fused kernel needs it on the device."""
    return param.device if group["fused"] else torch.device("cpu")
