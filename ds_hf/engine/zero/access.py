"""Reading and writing whole fp32 weights, gradients and moments of parameters (``safe_get_full_*`` and the like).

The full forms are collective: all ranks call them for the same parameter. The local forms see this rank's fragment,
flat ``[n]``, and communicate nothing. A parameter that the optimizer does not know gives ``None``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from ds_hf.engine.comm import collectives
from ds_hf.engine.zero.buffer import FlatBuffer, ParamHome, home_of

__all__ = [
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
]


class _States(Protocol):
    """The part of the sharded optimizer that this module uses; flat tensors over what the rank owns."""

    whole: bool

    def master(self, buffer: FlatBuffer) -> Tensor | None: ...
    def gradient(self, buffer: FlatBuffer) -> Tensor | None: ...
    def shows_gradient(self, buffer: FlatBuffer) -> bool: ...
    def set_gradient(self, buffer: FlatBuffer, value: Tensor) -> None: ...
    def moment(self, buffer: FlatBuffer, key: str) -> Tensor | None: ...
    def moment_dtype(self, buffer: FlatBuffer) -> torch.dtype: ...
    def set_moment(self, buffer: FlatBuffer, key: str, value: Tensor, *, create: bool = True) -> None: ...
    def write_master(self, buffer: FlatBuffer, master: Tensor) -> None: ...
    def masters_changed(self, buffer: FlatBuffer) -> None: ...


def _states(param: Tensor) -> tuple[ParamHome, _States] | None:
    home = home_of(param)
    if home is None or home.buffer.states is None:
        return None
    return home, cast(_States, home.buffer.states)


def _full(home: ParamHome, states: _States, owned: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor | None:
    """The parameter's part of a state, from every rank's piece; a rank that owns nothing of it brings zeros, which
    must have the ``dtype`` of the others."""
    buffer, slot = home.buffer, home.slot
    if not states.whole and buffer.axis.world_size > 1:
        present = torch.tensor(float(owned is not None), dtype=torch.float32, device=buffer.device)
        if collectives.all_reduce_max(present, buffer.axis, "the presence of a state") and owned is None:
            owned = torch.zeros(buffer.layout.shard_numel, dtype=dtype, device=buffer.device)
    if owned is None:
        return None
    whole = owned
    if not states.whole and buffer.axis.world_size > 1:
        whole = torch.empty(buffer.layout.numel, dtype=owned.dtype, device=buffer.device)
        collectives.all_gather(whole, owned.to(buffer.device), buffer.axis, buffer.labels.states)
    return slot.of(whole).to(buffer.device, copy=True)


def _local_range(home: ParamHome, states: _States) -> tuple[slice, slice]:
    """Where this rank's fragment lies: in the owned tensor, and in the flattened parameter."""
    low, high = (0, home.buffer.layout.numel) if states.whole else home.buffer.layout.shard_range(home.buffer.axis.rank)
    start, end = max(home.slot.offset, low), min(home.slot.end, high)
    end = max(start, end)
    if start == end:
        return slice(0, 0), slice(0, 0)
    return slice(start - low, end - low), slice(start - home.slot.offset, end - home.slot.offset)


def _write(home: ParamHome, states: _States, owned: Tensor, value: Tensor) -> None:
    """Put this rank's fragment of the whole ``value`` into ``owned``."""
    if value.shape != home.slot.shape:
        raise ValueError(f"the value has shape {tuple(value.shape)}, the parameter {tuple(home.slot.shape)}")
    inner, outer = _local_range(home, states)
    owned[inner].copy_(value.reshape(-1)[outer])


def safe_get_full_fp32_param(param: Tensor) -> Tensor | None:
    """The whole master weight, in fp32 and the parameter's shape. Collective."""
    found = _states(param)
    return None if found is None else _full(*found, found[1].master(found[0].buffer))


def safe_get_full_grad(param: Tensor) -> Tensor | None:
    """The whole averaged gradient, unscaled, fp32 in the parameter's shape, between ``backward`` and ``step``; ``None``
    before. Collective."""
    found = _states(param)
    if param.grad is not None and (found is None or not found[1].shows_gradient(found[0].buffer)):
        return param.grad
    return None if found is None else _full(*found, found[1].gradient(found[0].buffer))


def safe_get_full_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """The whole moment ``optim_state_key`` (``"exp_avg"``, ...), fp32 in the parameter's shape; ``None`` before the
    first step. Collective."""
    found = _states(param)
    if found is None:
        return None
    home, states = found
    return _full(home, states, states.moment(home.buffer, optim_state_key), states.moment_dtype(home.buffer))


@torch.no_grad()
def safe_set_full_fp32_param(param: Tensor, value: Tensor) -> None:
    """Set the whole master weight and the parameter with it. Collective; every rank gives the whole value,
    in the parameter's shape and any dtype.

    Raises:
        ValueError: the shape is not the parameter's, or no optimizer has the parameter.
    """
    home, states = _require(param)
    master = states.master(home.buffer)
    assert master is not None
    _write(home, states, master, value)
    states.write_master(home.buffer, master)
    states.masters_changed(home.buffer)


@torch.no_grad()
def safe_set_full_grad(param: Tensor, value: Tensor) -> None:
    """Set the whole averaged gradient (unscaled, in the parameter's shape and any dtype) for the coming step.

    Raises:
        ValueError: the shape is not the parameter's, no optimizer has it, or there is no gradient yet.
    """
    home, states = _require(param)
    gradient = states.gradient(home.buffer)
    if gradient is None:
        raise ValueError("there is no gradient to set: call it between backward() and step()")
    _write(home, states, gradient, value)
    states.set_gradient(home.buffer, gradient)


def safe_update_full_grad_vectorized(
    params: Sequence[Tensor], update_func: Callable[[Tensor | None, Tensor], Tensor | None]
) -> None:
    """Replace the whole averaged gradient of each parameter by ``update_func(gradient, parameter)``, both fp32 in its
    shape. Collective.

    Frozen parameters are passed over; ``None`` from the function leaves a gradient as it is.
    """
    for param in params:
        if param.requires_grad:
            value = update_func(safe_get_full_grad(param), param)
            if value is not None:
                safe_set_full_grad(param, value)


@torch.no_grad()
def safe_set_full_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Set the whole moment ``optim_state_key``; ``value`` has the parameter's shape and any dtype.

    Raises:
        ValueError: the shape is not the parameter's, or there is no such state yet.
    """
    home, states = _require(param)
    moment = states.moment(home.buffer, optim_state_key)
    if moment is None:
        raise ValueError(f"the optimizer has no state {optim_state_key!r} for this parameter (yet)")
    _write(home, states, moment, value)
    states.set_moment(home.buffer, optim_state_key, moment, create=False)


def safe_get_local_fp32_param(param: Tensor) -> Tensor | None:
    """This rank's fragment of the master weight, ``[n]`` in its dtype."""
    return _local(param, "master")


def safe_get_local_grad(param: Tensor) -> Tensor | None:
    """This rank's fragment of the averaged, unscaled gradient, fp32 ``[n]``."""
    return _local(param, "gradient")


def safe_get_local_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """This rank's fragment of a moment, ``[n]`` in its dtype."""
    return _local(param, "moment", optim_state_key)


def safe_set_local_fp32_param(param: Tensor, value: Tensor) -> None:
    """Set this rank's fragment of the master weight, ``[n]`` of any dtype. Collective: the weights are synced."""
    home, states = _require(param)
    master = states.master(home.buffer)
    assert master is not None
    with torch.no_grad():
        master[_local_range(home, states)[0]].copy_(value.reshape(-1))
    states.write_master(home.buffer, master)
    states.masters_changed(home.buffer)


def safe_set_local_grad(param: Tensor, value: Tensor) -> None:
    """Set this rank's fragment of the averaged gradient (unscaled), ``[n]`` of any dtype."""
    home, states = _require(param)
    gradient = states.gradient(home.buffer)
    if gradient is None:
        raise ValueError("there is no gradient to set: call it between backward() and step()")
    with torch.no_grad():
        gradient[_local_range(home, states)[0]].copy_(value.reshape(-1))
    states.set_gradient(home.buffer, gradient)


def safe_set_local_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Set this rank's fragment of a moment, ``[n]`` of any dtype."""
    home, states = _require(param)
    moment = states.moment(home.buffer, optim_state_key)
    if moment is None:
        raise ValueError(f"the optimizer has no state {optim_state_key!r} for this parameter (yet)")
    with torch.no_grad():
        moment[_local_range(home, states)[0]].copy_(value.reshape(-1))
    states.set_moment(home.buffer, optim_state_key, moment, create=False)


def _local(param: Tensor, what: str, *args: Any) -> Tensor | None:
    found = _states(param)
    if found is None:
        return None
    home, states = found
    owned = getattr(states, what)(home.buffer, *args)
    return None if owned is None else owned[_local_range(home, states)[0]].clone()


def _require(param: Tensor) -> tuple[ParamHome, _States]:
    found = _states(param)
    if found is None:
        raise ValueError("no optimizer of a ds_hf engine updates this parameter (frozen, or not initialized)")
    return found
