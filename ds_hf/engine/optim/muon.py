"""Muon (Jordan 2024, https://kellerjordan.github.io/posts/muon/) under DeepSpeed's class names, and AdamW beside it.

Groups with ``use_muon`` hold matrices: momentum, made nearly orthogonal, is their update. The other groups (embeddings,
heads, vectors) are AdamW's. Where a rank holds pieces of matrices, momentum is kept for the pieces; what neighbours
need of a matrix that is cut between them is all-gathered, once a unit, and each rank makes orthogonal the matrices of
which it holds a piece, and applies its piece.

State: ``momentum_buffer`` of matrices, ``step``, ``exp_avg``, ``exp_avg_sq`` of the rest.
Legend: an *update* is a tensor of fp32 (fp64 for fp64 params); ``[..., rows, columns]`` are a batch of matrices, but
``[out, in, height, width]`` of a convolution is one matrix ``[out, in * height * width]``, and a matrix whose rows are
those of attention heads (``muon_heads``) is a batch of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ds_hf.engine.comm import collectives
from ds_hf.engine.ops import library as ops
from ds_hf.engine.optim.adam import adam_update
from ds_hf.engine.optim.base import (
    TensorwiseOptimizer,
    UnitPieces,
    advance,
    alike,
    by_group,
    next_seed,
    outs_of,
    rate_of,
)
from ds_hf.engine.optim.muon_heads import head_rows
from ds_hf.engine.optim.newton_schulz import NS_METHODS, orthogonalized
from ds_hf.engine.zero.buffer import logical_shape
from ds_hf.engine.zero.layout import FlatLayout, Fragment

__all__ = ["Muon", "MuonWithAuxAdam"]

_SCALES = 2  # elements behind the pieces that a rank sends
_RANGE = 120  # of exponents whose powers of two fp32 can hold
_MOMENTS = ("exp_avg", "exp_avg_sq")
_MUON = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0, "ns_method": "gram"}
_ADAM = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0}


class MuonWithAuxAdam(TensorwiseOptimizer):
    """Muon for the groups with ``use_muon``, AdamW for the others.

    Args:
        param_groups: dictionaries with ``params``, ``use_muon``, and what shall differ from the defaults: ``lr``
            0.02, ``momentum`` 0.95, ``weight_decay`` 0, ``ns_method`` "gram" of Muon; ``lr`` 3e-4, ``betas``
            (0.9, 0.95), ``eps`` 1e-10, ``weight_decay`` 0 of Adam.
        adam_optimizer, fallback_to_inline: what DeepSpeed computes Adam with; without effect, the rule is the same.
        adam_optimizer_kwargs: the same; its ``adam_w_mode`` counts.
        adam_w_mode: False adds the weight decay of Adam's groups to their gradients.
    """

    def __init__(
        self,
        param_groups: Iterable[dict[str, Any]],
        adam_optimizer: Any = None,
        adam_optimizer_kwargs: Mapping[str, Any] | None = None,
        adam_w_mode: bool = True,
        fallback_to_inline: bool = False,
    ) -> None:
        kwargs = adam_optimizer_kwargs or {}
        self.adam_w_mode = bool(kwargs.get("adam_w_mode", kwargs.get("adamw_mode", adam_w_mode)))
        self._exchanges: dict[FlatLayout, _Exchange] = {}
        super().__init__(list(param_groups), {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if "use_muon" not in param_group:
            raise ValueError('every parameter group needs "use_muon": True (matrices) or False (all else)')
        super().add_param_group(_filled(param_group))
        if param_group["use_muon"]:
            try:
                _take_heads(self.param_groups[-1])
            except ValueError:
                self.param_groups.pop()
                raise

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("adam_w_mode", True)
        self._exchanges = {}
        for group in self.param_groups:  # loaded from torch.optim.Muon, which has no such key
            group.setdefault("use_muon", "betas" not in group)
            group.update(_filled(group))

    def _update(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        outs: list[Tensor],
        scale_and_skip: Tensor | None,
    ) -> None:
        if not group["use_muon"]:
            self._adam(group, params, grads, outs, scale_and_skip)
            return
        updates = _moved(group, [self._buffer(param) for param in params], grads, scale_and_skip)
        shapes = [_shape_of(param.shape, group) for param in params]
        done = _orthogonal(updates, shapes, group["ns_method"])
        self._apply(group, params, done, [_scale(shape) for shape in shapes], outs, scale_and_skip)

    @torch.no_grad()
    def update_pieces(self, units: Sequence[UnitPieces], scale_and_skip: Tensor | None) -> None:
        """Unit after unit: only one unit's updates exist at a time."""
        for unit in units:
            for group, pieces in by_group(p for p in unit.pieces if not p.group["use_muon"]):
                self._adam(group, [p.param for p in pieces], [p.grad for p in pieces], outs_of(pieces), scale_and_skip)
            self._muon(unit, scale_and_skip)

    def _adam(
        self,
        group: dict[str, Any],
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        outs: Sequence[Tensor],
        scale_and_skip: Tensor | None,
    ) -> None:
        states = [self._init_state(param, _MOMENTS) for param in params]
        advance(states, scale_and_skip)
        seed = next_seed(group, params, self.stochastic_rounding)
        adam_update(group, params, grads, outs, states, scale_and_skip, decoupled=self.adam_w_mode, seed=seed)

    def _muon(self, unit: UnitPieces, scale_and_skip: Tensor | None) -> None:
        """Momentum of the pieces, whole matrices from all holders, and this rank's pieces of the result."""
        groups = by_group(p for p in unit.pieces if p.group["use_muon"])
        updates: dict[int, Tensor] = {}
        for group, pieces in groups:
            buffers = [self._buffer(p.param).view(-1) for p in pieces]
            moved = _moved(group, buffers, [p.grad.view(-1) for p in pieces], scale_and_skip)
            updates.update((p.slot, update) for p, update in zip(pieces, moved, strict=True))
        if unit.axis is not None:
            updates = self._exchanged(unit, updates)
        for group, pieces in groups:
            matrices = [updates[p.slot].to(unit.axis_device) for p in pieces]
            shapes = [_shape_of(p.shape, group) for p in pieces]
            done = _orthogonal(matrices, shapes, group["ns_method"])
            mine = [
                matrix.reshape(-1)[p.start : p.start + p.param.numel()].to(unit.device)
                for p, matrix in zip(pieces, done, strict=True)
            ]
            scales = [_scale(shape) for shape in shapes]
            self._apply(group, [p.param for p in pieces], mine, scales, outs_of(pieces), scale_and_skip)

    def _apply(
        self,
        group: dict[str, Any],
        params: Sequence[Tensor],
        updates: Sequence[Tensor],
        scales: Sequence[float],
        outs: Sequence[Tensor],
        scale_and_skip: Tensor | None,
    ) -> None:
        """Decay and step in one pass: SGD with L2 decay is ``p - r (u + w p)``, which is to be ``(1 - l d) p - l s u``.

        Args:
            scales: ``s``, the factors that go by the parameters' shapes.
        """
        updates = [update.reshape(param.shape) for param, update in zip(params, updates, strict=True)]
        if scale_and_skip is not None:  # the gradients' factor is in the updates already
            scale_and_skip = torch.stack([torch.ones_like(scale_and_skip[0]), scale_and_skip[1]])
        for scale in dict.fromkeys(scales):
            chosen = [index for index, other in enumerate(scales) if other == scale]
            columns = [[column[index] for index in chosen] if column else [] for column in (params, updates, outs)]
            for work, steps, copies in alike(columns):
                ops.sgd_(
                    work,
                    steps,
                    [],
                    copies,
                    scale_and_skip,
                    lr=rate_of(group, work[0].device) * scale,
                    momentum=0.0,
                    dampening=0.0,
                    weight_decay=group["weight_decay"] / scale,
                    nesterov=False,
                    first=True,
                    seed=next_seed(group, work, self.stochastic_rounding),
                )

    def _buffer(self, param: Tensor) -> Tensor:
        state: dict[str, Any] = self.state[param]
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(param, dtype=self._state_dtype(param))
        buffer: Tensor = state["momentum_buffer"]
        return buffer

    def _state_dtype(self, param: Tensor) -> torch.dtype:
        return param.dtype if param.dtype is torch.float64 else super()._state_dtype(param)

    def _exchanged(self, unit: UnitPieces, updates: dict[int, Tensor]) -> dict[int, Tensor]:
        """``updates`` with whole matrices in the place of this rank's pieces of cut ones. Collective."""
        axis = unit.axis
        assert axis is not None
        exchange = self._exchanges.get(unit.layout)
        if exchange is None:
            exchange = self._exchanges[unit.layout] = _Exchange.of(unit)
        if exchange.numel == 0:
            return updates
        wire = torch.float16 if unit.dtype in (torch.float16, torch.bfloat16) else unit.dtype
        mine = exchange.packed(axis.rank, updates, torch.zeros(exchange.numel, dtype=wire, device=unit.device))
        mine = mine.to(unit.axis_device)
        full = torch.empty(axis.world_size * exchange.numel, dtype=wire, device=mine.device)
        collectives.all_gather(full, mine, axis, "Muon's updates")
        return {**updates, **exchange.unpacked(axis.rank, full.view(axis.world_size, -1))}


class Muon(MuonWithAuxAdam):
    """Muon over matrices alone."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.02,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        ns_method: str = "gram",
    ) -> None:
        shared = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "ns_method": ns_method}
        given: list[Any] = list(params)
        groups = given if given and isinstance(given[0], dict) else [{"params": given}]
        super().__init__([{"use_muon": True, **shared, **group} for group in groups])


@dataclass(frozen=True)
class _Exchange:
    """What ranks tell each other of a unit: the pieces of matrices that are cut between them.

    A rank has two such pieces at most, one at each end of its shard. fp16 holds more digits than bf16 of what was
    scaled to at most 1, which costs nothing: the power of two of each piece travels in the last two elements.

    Attributes:
        parts: for each rank, the fragments that it brings and where they lie in what it sends.
        numel: elements that each rank sends; ranks with less send zeros in between.
    """

    parts: list[list[tuple[Fragment, int]]]
    numel: int

    @classmethod
    def of(cls, unit: UnitPieces) -> _Exchange:
        assert unit.axis is not None
        parts: list[list[tuple[Fragment, int]]] = []
        numel = 0
        for rank in range(unit.axis.world_size):
            end = 0
            parts.append([])
            for fragment in unit.layout.fragments(rank):
                if unit.groups[fragment.slot.index]["use_muon"] and not fragment.whole:
                    parts[-1].append((fragment, end))
                    end += fragment.numel
            numel = max(numel, end)
        return cls(parts, numel + _SCALES if numel else 0)

    def packed(self, rank: int, updates: dict[int, Tensor], target: Tensor) -> Tensor:
        """What ``rank`` sends, written into ``target``."""
        for nth, (fragment, place) in enumerate(self.parts[rank]):
            if (update := updates.get(fragment.slot.index)) is None:
                continue  # frozen, on all ranks
            if target.dtype is torch.float16:
                exponent = torch.frexp(update.abs().amax()).exponent.clamp(-_RANGE, _RANGE).to(update.dtype)
                update = update * torch.exp2(-exponent)
                target[nth - _SCALES].copy_(exponent)
            target[place : place + fragment.numel].copy_(update)
        return target

    def unpacked(self, rank: int, full: Tensor) -> dict[int, Tensor]:
        """The whole matrices of which ``rank`` holds a piece, from what all ranks sent, ``[world size, numel]``."""
        wide = torch.float64 if full.dtype is torch.float64 else torch.float32
        found = {
            fragment.slot.index: torch.empty(fragment.slot.numel, dtype=wide, device=full.device)
            for fragment, _ in self.parts[rank]
        }
        for sender, parts in enumerate(self.parts):
            if not any(fragment.slot.index in found for fragment, _ in parts):
                continue
            values = full[sender].to(wide)
            scales = torch.exp2(values[-_SCALES:])
            for nth, (fragment, place) in enumerate(parts):
                if fragment.slot.index in found:
                    target = found[fragment.slot.index][fragment.start : fragment.start + fragment.numel]
                    torch.mul(values[place : place + fragment.numel], scales[nth], out=target)
        return found


def _filled(group: dict[str, Any]) -> dict[str, Any]:
    """The group with the defaults of its kind.

    Raises:
        ValueError: a number is out of range, or the method unknown.
    """
    group = {**(_MUON if group["use_muon"] else _ADAM), **group}
    for key in ("lr", "weight_decay", "eps"):
        if key in group and not group[key] >= 0.0:
            raise ValueError(f"{key} must not be negative, got {group[key]}")
    if group["use_muon"]:
        if not 0.0 <= group["momentum"] < 1.0:
            raise ValueError(f"momentum must be in [0, 1), got {group['momentum']}")
        if group["ns_method"] not in NS_METHODS:
            raise ValueError(f"ns_method must be one of {', '.join(NS_METHODS)}, got {group['ns_method']!r}")
        return group
    if not all(0.0 <= beta < 1.0 for beta in group["betas"]):
        raise ValueError(f"betas must both be in [0, 1), got {group['betas']}")
    return {**group, "betas": tuple(group["betas"])}


def _require_matrix(param: Tensor) -> None:
    shape = logical_shape(param)
    if len(shape) < 2:
        raise ValueError(
            f"Muon updates matrices, and a group with use_muon has a parameter of shape {tuple(shape)}: "
            'put it in a group with "use_muon": False'
        )


def _take_heads(group: dict[str, Any]) -> None:
    """Matrices whose rows are heads are made orthogonal a head at a time: how many rows one has is the group's."""
    for param in group["params"]:
        _require_matrix(param)
    found = {head_rows(param) for param in group["params"]}
    if len(found) > 1:
        raise ValueError(
            "a group with use_muon has matrices with heads of different sizes: put them in groups of their own"
        )
    if rows := next(iter(found), None):
        group["head_rows"] = rows


def _shape_of(shape: torch.Size, group: dict[str, Any]) -> torch.Size:
    """``[heads, rows, columns]`` of a matrix that is a head at a time, else the parameter's shape."""
    rows = group.get("head_rows")
    return shape if not rows else torch.Size((shape[0] // rows, rows, shape[1]))


def _moved(
    group: dict[str, Any], buffers: Sequence[Tensor], grads: Sequence[Tensor], scale_and_skip: Tensor | None
) -> list[Tensor]:
    """Move the momenta; returns Nesterov's look ahead, ``(1 - momentum) g + momentum m``."""
    updates = []
    for buffer, grad in zip(buffers, grads, strict=True):
        gradient, momentum = grad.to(_wide(buffer)), buffer.to(_wide(buffer))
        if scale_and_skip is not None:
            gradient = gradient * scale_and_skip[0]
        moved = torch.lerp(momentum, gradient, 1 - group["momentum"])
        updates.append(torch.lerp(gradient, moved, group["momentum"]))
        buffer.copy_(moved if scale_and_skip is None else torch.where(scale_and_skip[1] != 0, momentum, moved))
    return updates


def _orthogonal(updates: Sequence[Tensor], shapes: Sequence[torch.Size], ns_method: str) -> list[Tensor]:
    """Updates of whole parameters of ``shapes``, made orthogonal; of any shape, but in order."""
    matrices = [
        update.reshape(shape[0], -1) if len(shape) == 4 else update.reshape(shape)
        for update, shape in zip(updates, shapes, strict=True)
    ]
    return orthogonalized(matrices, ns_method)


def _scale(shape: torch.Size) -> float:
    """``sqrt(max(1, rows / columns))``; of a convolution's kernel, as Jordan's code and DeepSpeed's have it."""
    return max(1.0, shape[-2] / shape[-1]) ** 0.5 if shape.numel() else 1.0


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype is torch.float64 else torch.float32
