"""0/1 Adam (Lu et al. 2022, arXiv:2202.06009) under DeepSpeed's class name.

First the second moment is updated, with full gradients, in ever rarer steps; in the others the gradient is averaged in
one bit and moves the first moment alone. After ``var_freeze_step`` steps processes go their own ways for ever more
steps, between which their ways are averaged in one bit.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ds_hf.engine.comm import collectives
from ds_hf.engine.optim.base import Piece
from ds_hf.engine.optim.onebit.base import OneBitOptimizer, gradient, write

__all__ = ["ZeroOneAdam"]

_COUNTERS = {
    "var_interval": 1,
    "var_counter": 0,
    "local_step_interval": 1,
    "local_step_counter": 0,
    "lrs": 0.0,  # sum of learning rates since processes last were at one place
    "frozen": False,
}


class ZeroOneAdam(OneBitOptimizer):
    """0/1 Adam, for ZeRO stage 0.

    Args:
        deepspeed: the engine, as DeepSpeed's class takes it; not needed.
        var_freeze_step: steps after which the second moment is frozen.
        var_update_scaler: updates of the second moment after which the steps between them double.
        local_step_scaler: steps after which the steps between averages double ...
        local_step_clipper: ... up to so many.
        bias_correction, max_grad_norm, cuda_aware, comm_backend_name: without effect, see ``OnebitAdam``.

    In one process the first moment moves in every step; DeepSpeed's stands still where nothing is exchanged.
    """

    def __init__(
        self,
        params: ParamsT,
        deepspeed: Any = None,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        var_freeze_step: int = 100000,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32678,
        local_step_clipper: int = 16,
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
        self.var_freeze_step, self.var_update_scaler = var_freeze_step, var_update_scaler
        self.local_step_scaler, self.local_step_clipper = local_step_scaler, local_step_clipper
        self._places: dict[Tensor, Tensor] = {}  # of parameters, where all processes last were together
        super().__init__(params, deepspeed, defaults, amsgrad=amsgrad, eps_inside_sqrt=eps_inside_sqrt)

    def _counters(self) -> dict[str, Any]:
        return next((state for state in self.state.values() if "var_interval" in state), _COUNTERS)

    @property
    def freeze_key(self) -> bool:
        """DeepSpeed's name for whether the second moment is frozen."""
        return bool(self._counters()["frozen"])

    @property
    def reduces(self) -> bool:
        return not self.freeze_key and (self.steps + 1) % self._counters()["var_interval"] == 0

    def _step_unit(self, key: Hashable, pieces: list[Piece], scale_and_skip: Tensor | None) -> Iterator[None]:
        step = self._count(pieces, "exp_avg", "exp_avg_sq")
        for piece in pieces:
            for name, value in _COUNTERS.items():
                self.state[piece.param].setdefault(name, value)
        now = self.state[pieces[0].param]
        if now["frozen"]:
            self._local(pieces, scale_and_skip)
            if step % now["local_step_interval"] == 0:
                yield from self._meet(key, pieces)
        elif step % now["var_interval"] == 0:
            self._both_moments(pieces, scale_and_skip)
        else:
            yield from self._first_moment(key, pieces, scale_and_skip)
        write(pieces)
        self._schedule(key, pieces, step)

    def _both_moments(self, pieces: list[Piece], scale_and_skip: Tensor | None) -> None:
        for piece in pieces:
            state, (beta1, beta2) = self.state[piece.param], piece.group["betas"]
            grad = gradient(piece, scale_and_skip)
            state["exp_avg"].lerp_(grad, 1 - beta1)
            state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            piece.param.add_(self._move(piece))

    def _first_moment(self, key: Hashable, pieces: list[Piece], scale_and_skip: Tensor | None) -> Iterator[None]:
        for piece, value in zip(pieces, self._values(pieces), strict=True):
            torch.div(gradient(piece, scale_and_skip), self._size(piece.param, piece.group), out=value)
        means = yield from self._mean(key, pieces)
        for piece, mean in zip(pieces, means, strict=True):
            grad = mean.mul_(self._size(piece.param, piece.group))
            self.state[piece.param]["exp_avg"].lerp_(grad, 1 - piece.group["betas"][0])
            piece.param.add_(self._move(piece))

    def _local(self, pieces: list[Piece], scale_and_skip: Tensor | None) -> None:
        for piece in pieces:
            state = self.state[piece.param]
            state["exp_avg"].lerp_(gradient(piece, scale_and_skip), 1 - piece.group["betas"][0])
            state["lrs"] += float(piece.group["lr"])
            if piece.param not in self._places:
                self._places[piece.param] = piece.param.detach().clone()
            piece.param.add_(self._move(piece))

    def _move(self, piece: Piece) -> Tensor:
        state = self.state[piece.param]
        update = state["exp_avg"] / self._size(piece.param, piece.group)
        move: Tensor = update.add_(piece.param, alpha=piece.group["weight_decay"]).mul_(-float(piece.group["lr"]))
        return move

    def _meet(self, key: Hashable, pieces: list[Piece]) -> Iterator[None]:
        """Go on from the mean of all processes' places, averaged in one bit."""
        for piece, value in zip(pieces, self._values(pieces), strict=True):
            torch.sub(piece.param, self._places[piece.param], out=value)
        means = yield from self._mean(key, pieces)
        for piece, mean in zip(pieces, means, strict=True):
            self._go_on(piece.param, piece.group, mean)

    def _go_on(self, param: Tensor, group: dict[str, Any], mean: Tensor) -> None:
        state, size = self.state[param], self._size(param, group)
        param.copy_(self._places[param].add_(mean))
        torch.mul(mean, size, out=state["exp_avg"]).div_(-state["lrs"])
        state["lrs"] = 0.0

    def _schedule(self, key: Hashable, pieces: list[Piece], step: int) -> None:
        now = dict(self.state[pieces[0].param])
        if not now["frozen"]:
            if step % now["var_interval"] == 0:
                now["var_counter"] += 1
                if now["var_counter"] == self.var_update_scaler:
                    now["var_counter"], now["var_interval"] = 0, 2 * now["var_interval"]
            now["frozen"] = step > self.var_freeze_step
        else:
            now["local_step_counter"] += 1
            if now["local_step_counter"] == self.local_step_scaler:
                longer = min(self.local_step_clipper, 2 * now["local_step_interval"])
                now["local_step_counter"], now["local_step_interval"] = 0, longer
        begins = now["frozen"] and not self.state[pieces[0].param]["frozen"]
        for piece in pieces:
            state = self.state[piece.param]
            state.update({name: now[name] for name in _COUNTERS if name != "lrs"})
            if begins and "worker_error" in state:  # of gradients: what is exchanged from now on has another size
                state["worker_error"].zero_()
        if begins:
            self.exchange.drop(key)

    @torch.no_grad()
    def synchronise(self) -> bool:
        """Processes meet, exactly, before a checkpoint: they may be at different places."""
        super().synchronise()
        axis = self.exchange.axis
        apart = [
            (param, group) for group in self.param_groups for param in group["params"] if self.state[param].get("lrs")
        ]
        for param, group in apart:
            mean = param - self._places[param]
            if axis is not None and axis.world_size > 1:
                mean = collectives.all_reduce_sum(mean, axis, "weights of 0/1 Adam").div_(axis.world_size)
            self._go_on(param, group, mean)
        return bool(apart)

    def forget(self) -> None:
        super().forget()
        self._places.clear()
