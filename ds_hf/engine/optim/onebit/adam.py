"""1-bit Adam (Tang et al. 2021, arXiv:2102.02888) under DeepSpeed's class name.

Adam without bias correction for ``freeze_step`` steps; then the second moment is frozen, gradients stay where they are,
and the first moment, to which each process adds its own gradient, is averaged in one bit with error feedback.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from ds_hf.engine.ops import onebit
from ds_hf.engine.optim.base import Piece, by_group, outs_of
from ds_hf.engine.optim.onebit.base import OneBitOptimizer, gradient

__all__ = ["OnebitAdam"]


class OnebitAdam(OneBitOptimizer):
    """1-bit Adam, for ZeRO stage 0.

    Args:
        deepspeed: the engine, as DeepSpeed's class takes it; not needed.
        freeze_step: steps with full gradients, a tenth to a fifth of all, until the second moment has come to rest.
        bias_correction, max_grad_norm, cuda_aware, comm_backend_name: without effect here. DeepSpeed ignores the first
            too; the configuration's ``gradient_clipping`` clips.

    A parameter group with ``"exp_avg_mask": tensor`` multiplies its momenta by that after each exchange; one with
    ``"non_freeze": True`` keeps full gradients and an Adam that is not frozen.
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
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
    ) -> None:
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "max_grad_norm": max_grad_norm,
        }
        self.freeze_step = freeze_step
        super().__init__(params, deepspeed, defaults, amsgrad=amsgrad, eps_inside_sqrt=eps_inside_sqrt)

    @property
    def adam_freeze_key(self) -> bool:
        """DeepSpeed's name for whether momenta are exchanged in the coming step."""
        return self.steps >= self.freeze_step

    @property
    def reduces(self) -> bool:
        return not self.adam_freeze_key

    def _step_unit(self, key: Hashable, pieces: list[Piece], scale_and_skip: Tensor | None) -> Iterator[None]:
        step = self._count(pieces, "exp_avg", "exp_avg_sq")
        if step <= self.freeze_step:
            self._adam(pieces, [gradient(piece, scale_and_skip) for piece in pieces])
            return
        full = [piece for piece in pieces if piece.group.get("non_freeze")]
        if full:
            self._adam(full, self._averaged([gradient(piece, scale_and_skip) for piece in full]))
        rest = [piece for piece in pieces if not piece.group.get("non_freeze")]
        if rest:
            yield from self._frozen(key, rest, scale_and_skip)

    def _frozen(self, key: Hashable, pieces: list[Piece], scale_and_skip: Tensor | None) -> Iterator[None]:
        self._move_momenta(pieces, self._values(pieces), scale_and_skip)
        updates = yield from self._mean(key, pieces)
        numbered = {id(piece): update for piece, update in zip(pieces, updates, strict=True)}
        for group, some in by_group(pieces):
            params, momenta = [piece.param for piece in some], [self.state[piece.param]["exp_avg"] for piece in some]
            if self.exchange.ranks == 1:  # its momenta are what they are
                momenta = [momentum.clone() for momentum in momenta]
            onebit.apply_means_(
                params,
                momenta,
                outs_of(some),
                [numbered[id(piece)] for piece in some],
                self._sizes(params, group),
                lr=float(group["lr"]),
                weight_decay=group["weight_decay"],
            )
