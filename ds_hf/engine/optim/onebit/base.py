"""What the three rules share: when gradients are averaged, flat tensors of a unit, and what a checkpoint gets.

State of a parameter is DeepSpeed's: ``step`` (a number), ``exp_avg``, ``exp_avg_sq``, and ``worker_error`` once there
is an exchange. That one differs from process to process; ``synchronise`` makes it the same on all, so that a checkpoint
can hold it. What comes after is what a run resumed from that checkpoint computes, to the bit.

What is exchanged is divided by the root of the second moment first, which all processes have alike. A bit has the error
of the mean size of its block: without that, an element whose gradients are far below the others' would be moved by
errors alone. For the same reason second moments count as a hundredth of their parameter's mean at least; a word that
the warm-up has not seen has none to speak of.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Generator, Hashable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ds_hf.engine.comm import collectives
from ds_hf.engine.comm.mesh import Axis, axis_of
from ds_hf.engine.ops import library as ops
from ds_hf.engine.ops import onebit
from ds_hf.engine.optim.base import Piece, TensorwiseOptimizer, UnitPieces, by_group, outs_of
from ds_hf.engine.optim.onebit.exchange import OneBitExchange

__all__ = ["OneBitOptimizer", "gradient", "write"]

_LEAST = 0.01  # of a parameter's mean second moment
_HUGE = 1e36


class OneBitOptimizer(TensorwiseOptimizer):
    """A rule that averages compressed momenta itself, from some step on.

    Used without an engine it is given gradients that are averaged while ``reduces``, and each process's own later.
    """

    def __init__(
        self,
        params: ParamsT,
        deepspeed: Any,
        defaults: dict[str, Any],
        *,
        amsgrad: bool,
        eps_inside_sqrt: bool = False,
    ) -> None:
        if amsgrad:
            raise RuntimeError(f"{type(self).__name__} has no AMSGrad variant: remove amsgrad")
        for name in ("lr", "eps", "weight_decay"):
            if not defaults[name] >= 0.0:
                raise ValueError(f"{name} must not be negative, got {defaults[name]}")
        if not all(0.0 <= beta < 1.0 for beta in defaults["betas"]):
            raise ValueError(f"betas must both be in [0, 1), got {defaults['betas']}")
        self.deepspeed = deepspeed
        self.eps_inside_sqrt = eps_inside_sqrt
        self.comm_time = 0.0  # of DeepSpeed's classes; nothing is measured here
        self._exchange: OneBitExchange | None = None
        self._exchanged: dict[Hashable, list[Tensor]] = {}  # parameters by key, in the order of their flat tensor
        self._lives: dict[Tensor, Tensor] = {}  # whether parameters have had gradients
        self._floors: dict[Tensor, tuple[Tensor, int, Tensor]] = {}  # with the second moment that they are of
        self._numbers: dict[tuple[float, torch.device], Tensor] = {}
        super().__init__(params, defaults, fp32_optimizer_states=True)

    # -- for the engine -------------------------------------------------------------------------------------------

    def connect(self, axis: Axis) -> None:
        """Exchange over ``axis`` from now on."""
        self._exchange = OneBitExchange(axis)

    @property
    @abstractmethod
    def reduces(self) -> bool:
        """Until the rule averages momenta itself."""

    @torch.no_grad()
    def synchronise(self) -> bool:
        """Bring together what differs from process to process, before it is saved; whether parameters changed.
        Collective."""
        for key, params in self._exchanged.items():
            self._adopt(key, params)
            self.exchange.owed(key, _numel(params), params[0].device)
        return False

    def forget(self) -> None:
        """States were replaced: errors of the old ones are not owed."""
        self.exchange.forget()
        self._floors.clear()

    # -- steps ----------------------------------------------------------------------------------------------------

    @property
    def exchange(self) -> OneBitExchange:
        """Over the processes of the engine, without one over all there are."""
        if self._exchange is None:
            self._exchange = OneBitExchange(axis_of(None) if dist.is_initialized() else None)
        return self._exchange

    def update_pieces(self, units: Sequence[UnitPieces], scale_and_skip: Tensor | None) -> None:
        """One step of everything; parameters are whole."""
        self._step_units([(index, list(unit.pieces)) for index, unit in enumerate(units)], scale_and_skip)

    def _update(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        outs: list[Tensor],
        scale_and_skip: Tensor | None,
    ) -> None:
        if scale_and_skip is not None and bool(scale_and_skip[1] != 0):
            return
        pieces = [
            Piece(group, param, grad, outs[index] if outs else None, param.shape, 0, index, 0, 0)
            for index, (param, grad) in enumerate(zip(params, grads, strict=True))
        ]
        number = next(index for index, known in enumerate(self.param_groups) if known is group)
        self._step_units([(f"group {number}", pieces)], scale_and_skip)

    def _step_units(self, units: Sequence[tuple[Hashable, list[Piece]]], scale_and_skip: Tensor | None) -> None:
        """Units follow each other at the distance of one collective: while bytes of one are on their way, others
        compute. So there are three of them at most that hold anything."""
        under_way: deque[Iterator[None]] = deque()
        for key, pieces in units:
            if pieces:
                under_way.append(self._step_unit(key, pieces, scale_and_skip))
                _advance(under_way)
        while under_way:
            _advance(under_way)

    @abstractmethod
    def _step_unit(self, key: Hashable, pieces: list[Piece], scale_and_skip: Tensor | None) -> Iterator[None]:
        """One step of the pieces of a unit, of which there is one at least; yields where a collective is on its way.
        The second element of ``scale_and_skip`` is 0."""

    @property
    def steps(self) -> int:
        """Steps made, of the parameters that have been stepped."""
        return next((int(state["step"]) for state in self.state.values() if "step" in state), 0)

    def _count(self, pieces: Sequence[Piece], *moments: str) -> int:
        """Count a step of ``pieces``, whose states have ``moments`` then; which it is, from 1."""
        step = 0
        for piece in pieces:
            state = self.state[piece.param]
            for name in moments:
                if name not in state:
                    state[name] = torch.zeros_like(piece.param, dtype=torch.float32)
            step = state["step"] = int(state.get("step", 0)) + 1
        return step

    def _size(self, param: Tensor, group: dict[str, Any]) -> Tensor:
        """The root of the second moment, where errors come in of at least a hundredth of its mean; huge for a parameter
        that never had a gradient, so that nothing of it is sent."""
        return self._sizes([param], group)[0]

    def _sizes(self, params: Sequence[Tensor], group: dict[str, Any]) -> onebit.Sizes:
        """``_size`` of parameters of one group."""
        seconds, floors = [self.state[param]["exp_avg_sq"] for param in params], [self._floor(p) for p in params]
        return onebit.Sizes(seconds, floors, group["eps"], self.eps_inside_sqrt)

    def _move_momenta(self, pieces: Sequence[Piece], values: Sequence[Tensor], scale_and_skip: Tensor | None) -> None:
        """Move the first moments by this process's gradients; ``values`` become what is averaged of them."""
        numbered = {id(piece): value for piece, value in zip(pieces, values, strict=True)}
        for group, some in by_group(pieces):
            onebit.to_values_(
                [numbered[id(piece)] for piece in some],
                [self.state[piece.param]["exp_avg"] for piece in some],
                [piece.grad for piece in some],
                self._sizes([piece.param for piece in some], group),
                scale_and_skip,
                beta1=group["betas"][0],
            )

    def _floor(self, param: Tensor) -> Tensor:
        """What elements of its second moment count at least, see ``_size``; worked out again when that has changed."""
        second = self.state[param]["exp_avg_sq"]
        if self.exchange.ranks == 1 and "worker_error" not in self.state[param]:
            return self._number(0.0, param.device)
        known = self._floors.get(param)
        if known is not None and known[0] is second and known[1] == second._version:
            return known[2]
        mean = second.mean()
        self._lives[param] = mean > 0
        floor = torch.where(mean > 0, _LEAST * mean, _HUGE)
        self._floors[param] = second, second._version, floor
        return floor

    def _root(self, second: Tensor, group: dict[str, Any]) -> Tensor:
        return (second + group["eps"]).sqrt() if self.eps_inside_sqrt else second.sqrt().add_(group["eps"])

    def _values(self, pieces: Sequence[Piece]) -> list[Tensor]:
        """Where ``_mean`` expects what is to be averaged, one for each piece."""
        params = [piece.param for piece in pieces]
        return _parts(self.exchange.values(_numel(params), params[0].device), params)

    def _mean(self, key: Hashable, pieces: Sequence[Piece]) -> Generator[None, None, list[Tensor]]:
        """Over processes, of what lies in ``_values``; it lies there again, until the next yield. Collective."""
        if self.exchange.ranks == 1:
            return self._values(pieces)
        self._exchanged[key] = params = [piece.param for piece in pieces]
        self._adopt(key, params)
        mean = yield from self.exchange.mean(key, _numel(params), params[0].device, "momenta in one bit")
        parts = _parts(mean, params)
        return [_masked(self._alive(part, piece), piece) for part, piece in zip(parts, pieces, strict=True)]

    def _adopt(self, key: Hashable, params: Sequence[Tensor]) -> None:
        """Let the worker errors of the exchange be those of the parameters' states."""
        kept = self.exchange.kept(key, _numel(params), params[0].device)
        for param, mine in zip(params, _parts(kept.worker_error, params), strict=True):
            error = self.state[param].get("worker_error")
            if error is None or error.data_ptr() != mine.data_ptr():
                self.state[param]["worker_error"] = mine.zero_() if error is None else mine.copy_(error)

    def _alive(self, part: Tensor, piece: Piece) -> Tensor:
        """Nothing of what never had a gradient: of zeros in one bit only errors arrive."""
        lives = self._lives.get(piece.param)
        if lives is None or (not part.is_cuda and bool(lives)):  # a GPU is not waited for
            return part
        return part.mul_(lives)

    def _averaged(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """The plain mean of gradients over processes. Collective."""
        if self.exchange.axis is None or self.exchange.ranks == 1:
            return list(grads)
        flat = _flat(grads)
        collectives.all_reduce_sum(flat, self.exchange.axis, "gradients that are not compressed").div_(
            self.exchange.ranks
        )
        return _parts(flat, grads)

    def _adam(self, pieces: Sequence[Piece], grads: Sequence[Tensor]) -> None:
        """Adam without bias correction and with decoupled weight decay, of averaged gradients."""
        numbered = {id(piece): grad for piece, grad in zip(pieces, grads, strict=True)}
        for group, some in by_group(pieces):
            params = [piece.param for piece in some]
            beta1, beta2 = group["betas"]
            ops.adam_(
                params,
                [numbered[id(piece)] for piece in some],
                [self.state[param]["exp_avg"] for param in params],
                [self.state[param]["exp_avg_sq"] for param in params],
                outs_of(some),
                [self._number(1.0, params[0].device)] * len(params),
                None,
                lr=float(group["lr"]),
                beta1=beta1,
                beta2=beta2,
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                bias_correction=False,
            )

    def _number(self, value: float, device: torch.device) -> Tensor:
        if (value, device) not in self._numbers:
            self._numbers[value, device] = torch.full((), value, dtype=torch.float32, device=device)
        return self._numbers[value, device]


def gradient(piece: Piece, scale_and_skip: Tensor | None) -> Tensor:
    """The fp32 gradient of the piece, unscaled and clipped."""
    wide = piece.grad.float()
    return wide if scale_and_skip is None else wide * scale_and_skip[0]


def write(pieces: Sequence[Piece]) -> None:
    """Give the 16-bit parameters the masters' values."""
    for piece in pieces:
        if piece.out is not None:
            piece.out.copy_(piece.param)


def _masked(value: Tensor, piece: Piece) -> Tensor:
    """Of rows that never have a gradient (positions beyond the longest sequence) one bit would make noise."""
    mask = piece.group.get("exp_avg_mask")
    if mask is None:
        return value
    if mask.device != value.device:
        piece.group["exp_avg_mask"] = mask = mask.to(value.device)
    return value.mul_(mask.view_as(value) if mask.numel() == value.numel() else mask)  # DeepSpeed's are flat in fp16


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _parts(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    pieces = torch.split(flat, [tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]


def _numel(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _advance(under_way: deque[Iterator[None]]) -> None:
    """Let each go on to its next collective, the eldest first; forget those that have come to their end."""
    for _ in range(len(under_way)):
        each = under_way.popleft()
        if next(each, each) is None:
            under_way.append(each)
