"""The protocol that ds_hf's own optimizers share: update some tensors now, with the gradients given.

The engine holds masters and gradients in shards and steps unit after unit, so that all fp32 gradients never
exist at once. ``update(group, params, grads)`` is one step of exactly those params; ``step()`` is the usual
torch interface, written as ``update`` over every param that has ``.grad``. Invariant: state lives in
``self.state[param]`` under torch.optim's names and types (``step`` is a float32 scalar tensor), so checkpoints
are interchangeable with torch.optim.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

__all__ = ["StreamingOptimizer", "in_state_dtype", "write_back"]


class StreamingOptimizer(Optimizer):
    """A torch optimizer that can also step any subset of its params with explicit gradients.

    Attributes:
        fp32_optimizer_states: keep state in fp32 whatever the params' dtype; False keeps it in the params' dtype.
    """

    def __init__(self, params: ParamsT, defaults: dict[str, Any], *, fp32_optimizer_states: bool = True) -> None:
        self.fp32_optimizer_states = fp32_optimizer_states
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # groups loaded from a torch.optim checkpoint lack our own keys
            for key, value in self.defaults.items():
                group.setdefault(key, value)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        for option in ("amsgrad", "maximize", "differentiable"):
            if param_group.get(option, self.defaults.get(option)):
                raise ValueError(
                    f"{type(self).__name__} does not support {option}=True; remove it, "
                    "or use the torch.optim class of the same rule"
                )
        super().add_param_group(param_group)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step of every param that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if any(p.grad.is_sparse for p in params):
                raise ValueError(f"{type(self).__name__} needs dense gradients; build the embedding with sparse=False")
            self.update(group, params, [p.grad for p in params])
        return loss

    @torch.no_grad()
    def update(self, group: dict[str, Any], params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """One step of exactly ``params`` (members of ``group``) with ``grads``, ignoring ``param.grad``."""
        # torch's schedulers warn that step() was never called unless they see this mark.
        self._opt_called = True
        if params:
            self._update(group, list(params), list(grads))

    @abstractmethod
    def _update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        """The rule itself; called without autograd and with at least one param."""

    def _state_dtype(self, param: Tensor) -> torch.dtype:
        return torch.float32 if self.fp32_optimizer_states else param.dtype

    def _init_state(self, param: Tensor, moments: tuple[str, ...], fill: float = 0.0) -> dict[str, Any]:
        """The param's state, created as torch.optim would, ``step`` on the param's device as fused kernels want."""
        state: dict[str, Any] = self.state[param]
        for name in moments:
            if name not in state:
                state[name] = torch.full_like(param, fill, dtype=self._state_dtype(param))
        step = state.get("step", 0.0)
        if not isinstance(step, Tensor) or step.device != param.device or step.dtype != torch.float32:
            # A state written by hand, by DeepSpeed (int) or by unfused torch (CPU tensor).
            state["step"] = torch.tensor(float(step), dtype=torch.float32, device=param.device)
        return state


def in_state_dtype(tensors: list[Tensor], like: list[Tensor]) -> list[Tensor]:
    """``tensors`` in the dtype of ``like``, the same objects where the dtype already fits."""
    return [tensor.to(other.dtype) for tensor, other in zip(tensors, like, strict=True)]


def write_back(params: list[Tensor], work: list[Tensor]) -> None:
    """Copy the updated working tensors into the params that were cast to make them."""
    for param, updated in zip(params, work, strict=True):
        if updated is not param:
            param.copy_(updated)
