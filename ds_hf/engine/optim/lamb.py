"""LAMB (You et al. 2020, https://arxiv.org/abs/1904.00962) under DeepSpeed's class name, with its numerics.

Adam's update, scaled for each parameter by its trust ratio norm(p) / norm(update). Where a rank holds pieces of
parameters, the squares of both norms are summed over the ranks: one small all-reduce a step. State: ``step``,
``exp_avg``, ``exp_avg_sq``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ds_hf.engine.comm import collectives
from ds_hf.engine.ops import library as ops
from ds_hf.engine.optim.base import (
    Piece,
    TensorwiseOptimizer,
    UnitPieces,
    advance,
    alike,
    by_group,
    outs_of,
    rate_of,
)

__all__ = ["FusedLamb"]

_MOMENTS = ("exp_avg", "exp_avg_sq")


class FusedLamb(TensorwiseOptimizer):
    """LAMB wherever the params are.

    Args:
        eps_inside_sqrt: ``sqrt(v + eps)`` instead of ``sqrt(v) + eps``.
        max_grad_norm: ``step()`` first clips the gradients of a parameter group to this norm; 0 for none. Under an
            engine the configuration's ``gradient_clipping`` does that.
        max_coeff: upper bound of the trust ratio.
        min_coeff: lower bound of the trust ratio.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        for name, value in {"lr": lr, "eps": eps, "weight_decay": weight_decay, "max_grad_norm": max_grad_norm}.items():
            if not value >= 0.0:
                raise ValueError(f"{name} must not be negative, got {value}")
        if not (0.0 <= betas[0] < 1.0 and 0.0 <= betas[1] < 1.0):
            raise ValueError(f"betas must both be in [0, 1), got {betas}")
        if not 0.0 < min_coeff <= max_coeff:
            raise ValueError(f"0 < min_coeff <= max_coeff must hold, got {min_coeff} and {max_coeff}")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "max_grad_norm": max_grad_norm,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
            "amsgrad": amsgrad,
        }
        self.eps_inside_sqrt = eps_inside_sqrt
        # of the last step, by the parameter's id, with the bounds of the ratio
        self._norms: dict[int, tuple[Tensor, float, float]] = {}
        self._asked = False  # for the ratios: a GPU's one kernel would not tell them
        super().__init__(params, defaults, fp32_optimizer_states=True)

    def _update(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        outs: list[Tensor],
        scale_and_skip: Tensor | None,
    ) -> None:
        if group["max_grad_norm"] > 0:
            scale_and_skip = _clipped(grads, scale_and_skip, group["max_grad_norm"])
        states = [self._init_state(param, _MOMENTS) for param in params]
        advance(states, scale_and_skip)
        columns = [[state[key] for state in states] for key in (*_MOMENTS, "step")]
        for work, gradients, exp_avgs, exp_avg_sqs, steps, copies in alike([params, grads, *columns, outs]):
            self._step_whole(group, work, gradients, exp_avgs, exp_avg_sqs, copies, steps, scale_and_skip)

    def get_lamb_coeffs(self) -> list[float]:
        """The trust ratios of the last step, of the parameters that this process updated, in the order of updating.

        On a GPU that holds whole parameters the first call asks for them to be kept, and returns an empty list.
        """
        self._asked = True
        found = []
        for norms, low, high in self._norms.values():
            weight, size = norms.double().sqrt().tolist()
            found.append(min(max(weight / size, low), high) if weight > 0 and size > 0 else 1.0)
        return found

    def _states(self, pieces: Sequence[Piece], key: str) -> list[Tensor]:
        return [self.state[piece.param][key] for piece in pieces]

    def _settings(self, group: dict[str, Any]) -> dict[str, Any]:
        beta1, beta2 = group["betas"]
        settings = {"beta1": beta1, "beta2": beta2, "eps": group["eps"], "weight_decay": group["weight_decay"]}
        return {**settings, "eps_inside_sqrt": self.eps_inside_sqrt}

    @torch.no_grad()
    def update_pieces(self, units: Sequence[UnitPieces], scale_and_skip: Tensor | None) -> None:
        """Whole parameters at once, or both passes with the norms summed over the ranks in between."""
        for unit in units:
            advance([self._init_state(piece.param, _MOMENTS) for piece in unit.pieces], scale_and_skip)
        if all(unit.axis is None for unit in units):
            for group, pieces in by_group([piece for unit in units for piece in unit.pieces]):
                self._whole(group, pieces, scale_and_skip)
            return
        tables = {id(unit): self._moments(unit, scale_and_skip) for unit in units}
        for axis in dict.fromkeys(unit.axis for unit in units if unit.axis is not None):
            others = [unit for unit in units if unit.axis == axis]
            norms = torch.cat([tables[id(unit)] for unit in others])
            shared = collectives.all_reduce_sum(norms.to(units[0].axis_device), axis, "LAMB's norms").to(norms.device)
            split = torch.split(shared, [unit.slots for unit in others])
            tables.update((id(unit), table) for unit, table in zip(others, split, strict=True))
        for unit in units:
            for group, pieces in by_group(unit.pieces):
                self._apply(group, pieces, tables[id(unit)], scale_and_skip)

    def _whole(self, group: dict[str, Any], pieces: list[Piece], scale_and_skip: Tensor | None) -> None:
        self._step_whole(
            group,
            [p.param for p in pieces],
            [p.grad for p in pieces],
            self._states(pieces, "exp_avg"),
            self._states(pieces, "exp_avg_sq"),
            outs_of(pieces),
            self._states(pieces, "step"),
            scale_and_skip,
        )

    def _step_whole(
        self,
        group: dict[str, Any],
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        outs: Sequence[Tensor],
        steps: Sequence[Tensor],
        scale_and_skip: Tensor | None,
    ) -> None:
        """Both passes; in one call where the norms between them are not wanted, or where that is no faster."""
        rate = rate_of(group, params[0].device)
        settings, trust = self._settings(group), _trust(group)
        if params[0].is_cuda and not self._asked:
            ops.lamb_(params, grads, exp_avgs, exp_avg_sqs, outs, steps, scale_and_skip, lr=rate, **settings, **trust)
            return
        norms = ops.lamb_moments_(params, grads, exp_avgs, exp_avg_sqs, scale_and_skip, **settings)
        self._remember(group, params, norms)
        ops.lamb_apply_(params, exp_avgs, exp_avg_sqs, outs, steps, norms, scale_and_skip, lr=rate, **settings, **trust)

    def _remember(self, group: dict[str, Any], params: Sequence[Tensor], norms: Tensor) -> None:
        for param, row in zip(params, norms, strict=True):
            self._norms[id(param)] = (row, group["min_coeff"], group["max_coeff"])

    def _moments(self, unit: UnitPieces, scale_and_skip: Tensor | None) -> Tensor:
        """First pass: squares of this rank's pieces, ``[slots, 2]`` with zeros for parameters it holds nothing of."""
        table = torch.zeros(unit.slots, 2, dtype=torch.float32, device=unit.device)
        for group, pieces in by_group(unit.pieces):
            table[[p.slot for p in pieces]] = ops.lamb_moments_(
                [p.param for p in pieces],
                [p.grad for p in pieces],
                self._states(pieces, "exp_avg"),
                self._states(pieces, "exp_avg_sq"),
                scale_and_skip,
                **self._settings(group),
            )
        return table if unit.owners == 1 else table.div_(unit.owners)

    def _apply(self, group: dict[str, Any], pieces: list[Piece], table: Tensor, scale_and_skip: Tensor | None) -> None:
        params, norms = [p.param for p in pieces], table[[p.slot for p in pieces]]
        self._remember(group, params, norms)
        ops.lamb_apply_(
            params,
            self._states(pieces, "exp_avg"),
            self._states(pieces, "exp_avg_sq"),
            outs_of(pieces),
            self._states(pieces, "step"),
            norms,
            scale_and_skip,
            lr=rate_of(group, pieces[0].param.device),
            **self._settings(group),
            **_trust(group),
        )


def _trust(group: dict[str, Any]) -> dict[str, Any]:
    return {key: group[key] for key in ("bias_correction", "min_coeff", "max_coeff")}


def _clipped(grads: Sequence[Tensor], scale_and_skip: Tensor | None, max_norm: float) -> Tensor:
    """``scale_and_skip`` times what clips all gradients to ``max_norm``."""
    norm = ops.squared_norm(grads).sqrt()
    if scale_and_skip is None:
        scale_and_skip = torch.stack([torch.ones_like(norm), torch.zeros_like(norm)])
    scale = torch.where(
        norm * scale_and_skip[0] > max_norm, max_norm / (norm * scale_and_skip[0]), torch.ones_like(norm)
    )
    return torch.stack([scale_and_skip[0] * scale, scale_and_skip[1]])
