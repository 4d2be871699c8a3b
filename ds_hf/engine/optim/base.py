"""The protocols that ds_hf's own optimizers share: update some tensors now, with the gradients given.

The engine holds masters and gradients in shards and steps unit after unit, so that all fp32 gradients never exist at
once. ``StreamingOptimizer.update`` is one step of exactly the params it is given, in one pass: it reads 16-bit
gradients, unscales and clips them, and writes 16-bit copies of the params. ``step()`` is the usual torch interface,
written as ``update`` over every param that has ``.grad``. Rules that look at whole tensors (LAMB, Muon) are told what
part of each parameter the rank holds: ``TensorwiseOptimizer.update_pieces``.

Invariant: state lives in ``self.state[param]`` under torch.optim's names and types (``step`` is a float32 scalar
tensor), so checkpoints are interchangeable with torch.optim.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from ds_hf.engine.comm.mesh import Axis
from ds_hf.engine.zero.layout import FlatLayout

__all__ = [
    "Piece",
    "StreamingOptimizer",
    "TensorwiseOptimizer",
    "UnitPieces",
    "advance",
    "alike",
    "by_group",
    "next_seed",
    "outs_of",
    "rate_of",
]

_GRADS = 1


class StreamingOptimizer(Optimizer):
    """A torch optimizer that can also step any subset of its params with explicit gradients.

    Attributes:
        fp32_optimizer_states: keep state of 16-bit params in fp32; False keeps it in the params' dtype.
        stochastic_rounding: bf16 params and moments are rounded up or down at random, in proportion, so that updates
            too small for bf16 count on average. False rounds to nearest.
    """

    stochastic_rounding = False

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
            self.update(group, params, [self._dense(group, p.grad) for p in params])
        return loss

    def _dense(self, group: dict[str, Any], grad: Any) -> Tensor:
        """The gradient as the rule takes it.

        Raises:
            ValueError: it is sparse, and the rule would move what it has no value for.
        """
        if grad.is_sparse:
            raise ValueError(f"{type(self).__name__} needs dense gradients; build the embedding with sparse=False")
        return grad  # type: ignore[no-any-return]

    @torch.no_grad()
    def update(
        self,
        group: dict[str, Any],
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        outs: Sequence[Tensor] = (),
        scale_and_skip: Tensor | None = None,
    ) -> None:
        """One step of exactly ``params`` (members of ``group``) with ``grads``, ignoring ``param.grad``.

        Args:
            outs: 16-bit tensors of the params' sizes that take the new values as well; none by default.
            scale_and_skip: fp32 ``[2]``: factor of the gradients (unscale × clip), and a flag that forbids the step.
        """
        # torch's schedulers warn that step() was never called unless they see this mark.
        self._opt_called = True
        if params:
            self._update(group, list(params), list(grads), list(outs), scale_and_skip)

    @abstractmethod
    def _update(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        outs: list[Tensor],
        scale_and_skip: Tensor | None,
    ) -> None:
        """The rule itself; called without autograd and with at least one param."""

    def _state_dtype(self, param: Tensor) -> torch.dtype:
        return torch.promote_types(param.dtype, torch.float32) if self.fp32_optimizer_states else param.dtype

    def _init_state(self, param: Tensor, moments: tuple[str, ...], fill: float = 0.0) -> dict[str, Any]:
        """The param's state, created as torch.optim would, ``step`` on the param's device as kernels want it."""
        state: dict[str, Any] = self.state[param]
        for name in moments:
            if name not in state:
                state[name] = torch.full_like(param, fill, dtype=self._state_dtype(param))
        step = state.get("step", 0.0)
        if not isinstance(step, Tensor) or step.device != param.device or step.dtype != torch.float32:
            # A state written by hand, by DeepSpeed (int) or by unfused torch (CPU tensor).
            state["step"] = torch.tensor(float(step), dtype=torch.float32, device=param.device)
        return state


@dataclass(frozen=True)
class Piece:
    """What this rank holds of one parameter: flat, or of the parameter's shape when it is the whole of it.

    Attributes:
        group: parameter group.
        param: master weights.
        grad: gradient of the same elements, any floating dtype.
        out: the 16-bit parameter, or None where ``param`` is the parameter itself.
        shape: of the whole parameter.
        start: first element, inside the whole parameter.
        slot: number of the parameter within its unit.
        offset: of the whole parameter, inside the unit.
        shard_start: of the piece, inside what the rank holds of the unit.
    """

    group: dict[str, Any]
    param: Tensor
    grad: Tensor
    out: Tensor | None
    shape: torch.Size
    start: int
    slot: int
    offset: int
    shard_start: int


@dataclass(frozen=True)
class UnitPieces:
    """The pieces that one rank holds of a unit.

    Attributes:
        pieces: possibly none.
        slots: parameters in the whole unit.
        layout: where they lie, and which rank holds what of them.
        groups: the parameter group of each of them.
        dtype: in which their gradients travel.
        axis: ranks that hold the other pieces; None when the pieces are whole parameters.
        device: where the unit's states are.
        axis_device: where the processes of ``axis`` meet: NCCL takes no tensor in host memory.
        owners: processes of ``axis`` that hold each of the pieces.
    """

    pieces: Sequence[Piece]
    slots: int
    layout: FlatLayout
    groups: Sequence[dict[str, Any]]
    dtype: torch.dtype
    axis: Axis | None
    device: torch.device
    axis_device: torch.device
    owners: int = 1


class TensorwiseOptimizer(StreamingOptimizer):
    """A rule that looks at whole parameters, and knows how to when each rank holds a piece of them."""

    @property
    def reduces(self) -> bool:
        """Whether the coming step wants gradients that are averaged over processes; else it is given those of this
        process. The same on all of them."""
        return True

    def synchronise(self) -> bool:
        """Before states are saved: bring together what differs from process to process; whether params changed.
        Collective."""
        return False

    def forget(self) -> None:
        """States were replaced from outside: what is kept beside them is stale."""

    @abstractmethod
    def update_pieces(self, units: Sequence[UnitPieces], scale_and_skip: Tensor | None) -> None:
        """One step of everything. Collective where an axis is given."""


def by_group(pieces: Iterable[Piece]) -> list[tuple[dict[str, Any], list[Piece]]]:
    """The pieces of each parameter group, in order; those of other dtypes apart, as an operator's call wants them."""
    found: dict[tuple[Any, ...], tuple[dict[str, Any], list[Piece]]] = {}
    for piece in pieces:
        key = (id(piece.group), piece.param.dtype, piece.grad.dtype, None if piece.out is None else piece.out.dtype)
        found.setdefault(key, (piece.group, []))[1].append(piece)
    return list(found.values())


def outs_of(pieces: Iterable[Piece]) -> list[Tensor]:
    """The 16-bit parameters of the pieces; none where the masters are the parameters."""
    return [piece.out for piece in pieces if piece.out is not None]


def next_seed(group: dict[str, Any], params: Sequence[Tensor], wanted: bool) -> int | None:
    """The seed of a call that rounds stochastically, another one each time; None where nothing is to be rounded.

    The group counts the calls, so that a resumed run rounds as the uninterrupted one.
    """
    if not wanted or params[0].dtype is not torch.bfloat16:
        return None
    group["roundings"] = int(group.get("roundings", 0)) + 1
    return int(group["roundings"])


def rate_of(group: dict[str, Any], device: torch.device) -> float | Tensor:
    """``group["lr"]``: a tensor stays on the device (CUDA graphs), everything else is a number."""
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.device == device and device.type != "cpu":
        return lr.to(torch.float32)
    return float(lr)


def advance(states: Sequence[dict[str, Any]], scale_and_skip: Tensor | None) -> None:
    """Count a step, unless ``scale_and_skip`` forbids it."""
    steps = [state["step"] for state in states]
    if not steps:  # a rank that owns nothing of a unit takes part in its collectives all the same
        return
    if scale_and_skip is None:
        torch._foreach_add_(steps, 1)
    else:
        one = (scale_and_skip[1] == 0).float()
        torch._foreach_add_(steps, [one] * len(steps))  # of a single tensor it would ask for the value: the host waits


def alike(lists: Sequence[Sequence[Tensor]]) -> Iterator[list[list[Tensor]]]:
    """Split parallel lists, of which the second holds gradients, into calls of one device and one dtype a list.

    Tensors that are not contiguous are replaced by contiguous copies, written back when the caller goes on. An empty
    list stays empty.
    """
    calls: dict[tuple[Any, ...], list[int]] = {}
    for index in range(len(lists[0])):
        key = tuple((tensors[index].device, tensors[index].dtype) for tensors in lists if tensors)
        calls.setdefault(key, []).append(index)
    for indices in calls.values():
        chosen = [[tensors[index] for index in indices] if tensors else [] for tensors in lists]
        dense = [[tensor.contiguous() for tensor in tensors] for tensors in chosen]
        yield dense
        for place, (given, used) in enumerate(zip(chosen, dense, strict=True)):
            for tensor, copy in zip(given, used, strict=True):
                if copy is not tensor and place != _GRADS:
                    tensor.copy_(copy)
