"""1-bit LAMB (Li et al. 2021, arXiv:2104.06069) under DeepSpeed's class name.

LAMB for ``freeze_step`` steps. Then momenta are averaged in one bit, divided by the roots of the frozen second moments:
that brings them to one size, as DeepSpeed's ``scaling_coeff`` does tensor by tensor. Trust ratios are those of the
warm-up, corrected by how the second moment of the gradients has changed since, as far as momenta show it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ds_hf.engine.optim.base import Piece
from ds_hf.engine.optim.onebit.base import OneBitOptimizer, gradient, write

__all__ = ["OnebitLamb"]


class OnebitLamb(OneBitOptimizer):
    """1-bit LAMB, for ZeRO stage 0.

    Args:
        deepspeed: the engine, as DeepSpeed's class takes it; not needed.
        freeze_step: steps with full gradients.
        max_coeff, min_coeff: bounds of the trust ratio in the warm-up.
        coeff_beta: of the running mean of trust ratios that later steps use.
        factor_max, factor_min: bounds of the correction of that mean ...
        factor_threshold: ... and by which share it may change in a step.
        bias_correction, max_grad_norm, cuda_aware, comm_backend_name: without effect, see ``OnebitAdam``.

    A parameter group may have an ``exp_avg_mask``, see there.
    """

    def __init__(
        self,
        params: ParamsT,
        deepspeed: Any = None,
        lr: float = 1e-3,
        freeze_step: int = 100000,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
    ) -> None:
        if not 0.0 < min_coeff <= max_coeff:
            raise ValueError(f"0 < min_coeff <= max_coeff must hold, got {min_coeff} and {max_coeff}")
        if not 0.0 <= coeff_beta <= 1.0:
            raise ValueError(f"coeff_beta must be in [0, 1], got {coeff_beta}")
        if not 0.0 < factor_min <= factor_max:
            raise ValueError(f"0 < factor_min <= factor_max must hold, got {factor_min} and {factor_max}")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "max_grad_norm": max_grad_norm,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
        }
        self.freeze_step, self.coeff_beta = freeze_step, coeff_beta
        self.factor_max, self.factor_min, self.factor_threshold = factor_max, factor_min, factor_threshold
        self.lamb_coeffs: list[float] = []
        super().__init__(params, deepspeed, defaults, amsgrad=amsgrad, eps_inside_sqrt=eps_inside_sqrt)

    def get_lamb_coeffs(self) -> list[float]:
        """The trust ratios of the last step, in the order of updating."""
        return list(self.lamb_coeffs)

    @property
    def lamb_freeze_key(self) -> bool:
        """DeepSpeed's name for whether momenta are exchanged in the coming step."""
        return self.steps >= self.freeze_step

    @property
    def reduces(self) -> bool:
        return not self.lamb_freeze_key

    def _step_units(self, units: Sequence[tuple[Hashable, list[Piece]]], scale_and_skip: Tensor | None) -> None:
        self.lamb_coeffs = []
        super()._step_units(units, scale_and_skip)

    def _step_unit(self, key: Hashable, pieces: list[Piece], scale_and_skip: Tensor | None) -> Iterator[None]:
        step = self._count(pieces, "exp_avg", "exp_avg_sq")
        if step <= self.freeze_step:
            for piece in pieces:
                self._warm(piece, gradient(piece, scale_and_skip))
        else:
            self._begin(pieces)
            yield from self._frozen(key, pieces, scale_and_skip)
        write(pieces)

    # -- with full gradients ----------------------------------------------------------------------------------------

    def _warm(self, piece: Piece, grad: Tensor) -> None:
        state, group = self.state[piece.param], piece.group
        beta1, beta2 = group["betas"]
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        update = state["exp_avg"] / self._root(state["exp_avg_sq"], group)
        update.add_(piece.param, alpha=group["weight_decay"])
        weight, size = torch.stack([piece.param.norm(), update.norm()]).tolist()
        ratio = 1.0
        if weight > 0 and size > 0:
            ratio = min(max(weight / size, group["min_coeff"]), group["max_coeff"])
        if ratio != 1.0:
            before = state.get("lamb_coeff_freeze", 0.0)
            state["lamb_coeff_freeze"] = self.coeff_beta * before + (1 - self.coeff_beta) * ratio
        self.lamb_coeffs.append(ratio)
        piece.param.add_(update, alpha=-float(group["lr"]) * ratio)

    # -- with momenta in one bit --------------------------------------------------------------------------------------

    def _begin(self, pieces: Sequence[Piece]) -> None:
        """The warm-up is over, for those of which it was not."""
        new = [piece for piece in pieces if "exp_avg_sq_fresh" not in self.state[piece.param]]
        for piece in new:
            state = self.state[piece.param]
            state["exp_avg_sq_fresh"] = state["exp_avg_sq"].clone()
            state.setdefault("lamb_coeff_freeze", 0.0)
            state["last_factor"] = 1.0

    def _frozen(self, key: Hashable, pieces: list[Piece], scale_and_skip: Tensor | None) -> Iterator[None]:
        before = [self.state[piece.param]["exp_avg"].clone() for piece in pieces]
        self._move_momenta(pieces, self._values(pieces), scale_and_skip)
        means = yield from self._mean(key, pieces)
        for piece, mean, last in zip(pieces, means, before, strict=True):
            state, size = self.state[piece.param], self._size(piece.param, piece.group)
            if self.exchange.ranks > 1:
                torch.mul(mean, size, out=state["exp_avg"])
            self._apply(piece, state, size, mean, last)

    def _apply(self, piece: Piece, state: dict[str, Any], size: Tensor, adam: Tensor, last: Tensor) -> None:
        group = piece.group
        beta1, beta2 = group["betas"]
        grad = (state["exp_avg"] - beta1 * last).div_(1 - beta1)
        state["exp_avg_sq_fresh"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        update = adam.add(piece.param, alpha=group["weight_decay"])
        ratios = size / self._root(state["exp_avg_sq_fresh"], group)
        factor, part, whole = torch.stack([ratios.max(), adam.norm(), update.norm()]).tolist()
        if group["weight_decay"] > 0:
            share = min(1.0, part / whole) if whole > 0 else 1.0
            factor = factor * share + 1 - share
        factor = min(max(factor, self.factor_min), self.factor_max)
        low, high = 1 - self.factor_threshold, 1 + self.factor_threshold
        factor = min(max(factor, state["last_factor"] * low), state["last_factor"] * high)
        state["last_factor"] = factor
        ratio = state["lamb_coeff_freeze"] * factor
        self.lamb_coeffs.append(ratio)
        piece.param.add_(update, alpha=-float(group["lr"]) * ratio)
