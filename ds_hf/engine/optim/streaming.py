"""Which optimizers can be stepped unit by unit, and which may be given shards of flattened params.

``streamed_update`` returns a function of (group, params, grads) that makes one step of only those params, or None
when only ``optimizer.step()`` over everything is known to be right. ``is_elementwise`` says whether an
optimizer treats each element alone, so that it does not matter how params are cut into shards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_hf.config.optimizer_traits import traits_of
from ds_hf.engine.ops import library as ops
from ds_hf.engine.optim.adagrad import adagrad_update
from ds_hf.engine.optim.adam import adam_update
from ds_hf.engine.optim.base import StreamingOptimizer, TensorwiseOptimizer, advance, alike, next_seed, rate_of

__all__ = ["Narrow", "UnitUpdate", "is_elementwise", "is_known", "library_of", "streamed_update"]

UnitUpdate = Callable[..., None]  # (group, params, grads, outs, scale_and_skip), as StreamingOptimizer.update


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the update of an element depends on that element's own gradient and state only.

    Exact torch classes and ds_hf's own; False for Adafactor, Muon, LBFGS, and everything unknown.
    """
    if isinstance(optimizer, StreamingOptimizer):
        return not isinstance(optimizer, TensorwiseOptimizer)
    return is_known(optimizer) and traits_of(type(optimizer).__name__).elementwise


def is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is of ds_hf or an exact class of torch. Other libraries have classes of the same names (bitsandbytes'
    ``AdamW``), whose states are others."""
    kind = type(optimizer)
    return isinstance(optimizer, StreamingOptimizer) or kind is getattr(torch.optim, kind.__name__, None)


def library_of(optimizer: torch.optim.Optimizer) -> str:
    """Whose states it has: "torch" for ours, too, for what is derived from a rule of torch's, and for torchao's."""
    above = [kind for kind in type(optimizer).__mro__ if kind is not torch.optim.Optimizer]
    if is_known(optimizer) or any(kind is getattr(torch.optim, kind.__name__, None) for kind in above):
        return "torch"
    name = type(optimizer).__module__.partition(".")[0]
    return "torch" if name == "torchao" else name


@dataclass(frozen=True)
class Narrow:
    """How bf16 masters are updated by torch's optimizers.

    Attributes:
        fp32_moments: moments in fp32, else in the masters' dtype.
        stochastic: see ``StreamingOptimizer.stochastic_rounding``.
    """

    fp32_moments: bool = False
    stochastic: bool = False


def streamed_update(optimizer: torch.optim.Optimizer, narrow: Narrow | None = None) -> UnitUpdate | None:
    """A function that steps some params of ``optimizer`` with given gradients, or None if it must step whole."""
    narrow = narrow or Narrow()
    if _is_observed(optimizer):
        return None
    if isinstance(optimizer, StreamingOptimizer):
        return optimizer.update
    if not all(map(_is_ordinary, optimizer.param_groups)):
        return None
    if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
        return _torch_adam_update(optimizer, narrow)
    if type(optimizer) is torch.optim.Adagrad:
        return _torch_adagrad_update(optimizer, narrow)
    if type(optimizer) is torch.optim.SGD:
        return _torch_sgd_update(optimizer, narrow)
    return None


def _is_observed(optimizer: torch.optim.Optimizer) -> bool:
    """Someone hooked or replaced ``step`` and expects it to be called (torch's schedulers only count calls)."""
    replaced = optimizer.__dict__.get("step")
    hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(hooked) or (replaced is not None and not hasattr(replaced, "_wrapped_by_lr_sched"))


def _is_ordinary(group: dict[str, Any]) -> bool:
    flags = ("amsgrad", "maximize", "differentiable", "capturable")
    tensors = (group.get("lr"), *group.get("betas", ()))
    return not any(group.get(flag) for flag in flags) and not any(isinstance(value, Tensor) for value in tensors)


def _torch_adam_update(optimizer: torch.optim.Optimizer, narrow: Narrow) -> UnitUpdate:
    @torch.no_grad()
    def update(
        group: dict[str, Any],
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        outs: Sequence[Tensor] = (),
        scale_and_skip: Tensor | None = None,
    ) -> None:
        # What torch's schedulers look at to know that a step was made.
        optimizer._opt_called = True  # type: ignore[attr-defined]
        if not params:
            return
        states = [_state(optimizer, param, {"exp_avg": 0.0, "exp_avg_sq": 0.0}, narrow) for param in params]
        advance(states, scale_and_skip)
        seed = next_seed(group, params, narrow.stochastic)
        decoupled = group["decoupled_weight_decay"]
        adam_update(group, params, grads, outs, states, scale_and_skip, decoupled=decoupled, seed=seed)

    return update


def _torch_adagrad_update(optimizer: torch.optim.Optimizer, narrow: Narrow) -> UnitUpdate:
    @torch.no_grad()
    def update(
        group: dict[str, Any],
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        outs: Sequence[Tensor] = (),
        scale_and_skip: Tensor | None = None,
    ) -> None:
        optimizer._opt_called = True  # type: ignore[attr-defined]
        if not params:
            return
        # torch makes this state in its constructor, where the params were not shards yet.
        states = [_state(optimizer, param, {"sum": group["initial_accumulator_value"]}, narrow) for param in params]
        advance(states, scale_and_skip)
        seed = next_seed(group, params, narrow.stochastic)
        adagrad_update(group, params, grads, outs, states, scale_and_skip, seed)

    return update


def _state(
    optimizer: torch.optim.Optimizer, param: Tensor, moments: dict[str, float], narrow: Narrow
) -> dict[str, Any]:
    """The param's state under torch's names, with the counter beside the param, where kernels read it."""
    state: dict[str, Any] = optimizer.state[param]
    for name, fill in moments.items():
        if name not in state:
            state[name] = torch.full_like(param, fill, dtype=_moment_dtype(param, narrow))
    step = state.get("step", 0.0)
    if not isinstance(step, Tensor) or step.device != param.device or step.dtype != torch.float32:
        state["step"] = torch.full((), float(step), dtype=torch.float32, device=param.device)
    return state


def _moment_dtype(param: Tensor, narrow: Narrow) -> torch.dtype:
    return torch.float32 if narrow.fp32_moments and param.dtype is torch.bfloat16 else param.dtype


def _torch_sgd_update(optimizer: torch.optim.Optimizer, narrow: Narrow) -> UnitUpdate:
    @torch.no_grad()
    def update(
        group: dict[str, Any],
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        outs: Sequence[Tensor] = (),
        scale_and_skip: Tensor | None = None,
    ) -> None:
        optimizer._opt_called = True  # type: ignore[attr-defined]
        fresh = [optimizer.state[param].get("momentum_buffer") is None for param in params]
        for first in (True, False):
            chosen = [index for index, is_fresh in enumerate(fresh) if is_fresh is first]
            if chosen:
                sgd_update(
                    optimizer,
                    group,
                    [params[i] for i in chosen],
                    [grads[i] for i in chosen],
                    [outs[i] for i in chosen] if outs else [],
                    scale_and_skip,
                    narrow,
                    first=first,
                )

    return update


def sgd_update(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    outs: Sequence[Tensor],
    scale_and_skip: Tensor | None,
    narrow: Narrow,
    *,
    first: bool,
) -> None:
    """SGD over torch's names of states and groups, for params that all have a momentum or (``first``) all have none."""
    momenta: list[Tensor] = []
    if group["momentum"]:
        if first:
            for param in params:
                optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param, dtype=_moment_dtype(param, narrow))
        momenta = [optimizer.state[param]["momentum_buffer"] for param in params]
    seed = next_seed(group, params, narrow.stochastic)
    for work, gradients, buffers, copies in alike([params, grads, momenta, outs]):
        ops.sgd_(
            work,
            gradients,
            buffers,
            copies,
            scale_and_skip,
            lr=rate_of(group, work[0].device),
            momentum=group["momentum"],
            dampening=group["dampening"],
            weight_decay=group["weight_decay"],
            nesterov=group["nesterov"],
            first=first,
            seed=seed,
        )
