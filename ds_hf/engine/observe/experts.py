"""How evenly tokens are divided over experts: for monitors, and a warning where a router collapses.

``Train/Experts/fullest_share`` is the share of all tokens that go through the fullest expert, in the layer where it is
largest: k / experts where a router is balanced, 1 where it has collapsed. ``Train/Experts/unused`` is the number of
experts, of all layers, that had no token. Both are of all processes and of the steps since they were told last.

Counting takes one small kernel a layer and pass; every ``STEPS`` steps counts are added up over all processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ds_hf.config.types import Config
from ds_hf.engine.comm import collectives
from ds_hf.engine.comm.mesh import Mesh
from ds_hf.engine.events import Events, Observer
from ds_hf.engine.parallel.experts.layer import ExpertLayer
from ds_hf.engine.parallel.experts.plan import plan_experts
from ds_hf.log import warn_once

__all__ = ["STEPS", "Balance", "attach"]

STEPS = 20
_COLLAPSED, _FAIR = 0.9, 0.6  # share of the fullest expert; beyond such a fair share nothing can be said


class BalancedEngine(Protocol):
    """The engine as this sees it."""

    module: nn.Module
    settings: Config
    mesh: Mesh
    device: torch.device
    monitor: Any
    events: Events
    global_samples: int


class _Counter:
    """Counts the tokens of one layer, by a hook whose code is the same for all layers: compiled blocks that are alike
    share their graphs, so nothing that differs between layers may be a constant in it, and a layer's counts have memory
    of their own, whose alignment is that of the others.

    What it notes in a graph are tensors: dynamo lets a checkpoint inside of a block change nothing else, and would
    leave the block eager.

    Attributes:
        row: int64 ``[experts + 1]``: routes to each expert since they were told last, and to none.
        top: int64, experts of a token; 0 as long as none came, also of models that train in ``eval()``.
    """

    def __init__(self, experts: int, device: torch.device) -> None:
        self.row = torch.zeros(experts + 1, dtype=torch.int64, device=device)
        self.top, self._noted = torch.zeros((), dtype=torch.int64, device=device), 0

    def count(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        chosen = args[1] if len(args) > 1 else next((v for k, v in kwargs.items() if "ind" in k), None)
        if not isinstance(chosen, Tensor):
            return
        self._note(chosen.shape[-1])
        if not (module.training and torch.is_grad_enabled()):
            return
        last = self.row.shape[0] - 1
        flat = chosen.reshape(-1).long().clamp(-1, last).remainder(last + 1)  # -1, too, stands for none
        self.row.scatter_add_(0, flat, torch.ones_like(flat))

    def _note(self, top: int) -> None:
        if torch.compiler.is_compiling():
            self.top.fill_(top)
        elif self._noted != top:  # no kernel in each pass
            self.top.fill_(top)
            self._noted = top


class Balance(Observer):
    """Counts the tokens of each expert while ``engine`` trains.

    Attributes:
        counters: of the layers, in their order.
        total: int64 ``[layers, experts + 1]``: routes of this process, until they were told last.
    """

    def __init__(self, engine: BalancedEngine, layers: list[ExpertLayer]) -> None:
        self.engine, self.layers = engine, layers
        most = max(layer.count for layer in layers)
        self.counters = [_Counter(most, engine.device) for _ in layers]
        self.total = self._counts()
        self._steps = 0
        self._hooks = [
            layer.module.register_forward_pre_hook(counter.count, with_kwargs=True)
            for layer, counter in zip(layers, self.counters, strict=True)
        ]

    def _counts(self) -> Tensor:
        """int64 ``[layers, experts + 1]``, since they were told last."""
        return torch.stack([counter.row for counter in self.counters])

    def _tops(self) -> list[int]:
        """Experts of a token, by layer; 0: none has come."""
        return [int(top) for top in torch.stack([counter.top for counter in self.counters]).tolist()]

    def after_step(self, engine: Any) -> None:
        """Every ``STEPS`` steps, at the same moment on all processes: an outcome is known to each when it asks."""
        self._steps += 1
        if self._steps == 1 and self.engine.mesh.shape.expert > 1:
            self._tell_uncalled()
        if self._steps % STEPS == 0:
            self.tell()

    def _tell_uncalled(self) -> None:
        """A block that takes weights of its experts and computes by itself has those of this process alone."""
        names = [layer.name for layer, top in zip(self.layers, self._tops(), strict=True) if not top]
        if names:
            warn_once(
                f"no token came to {names[0]} and {len(names) - 1} other layers of divided experts in the first step. "
                "If a block reads the weights of its experts and does not call them, each process computes with its "
                'part of them: set "autoep_size": 1, or call them with (hidden states, indices, weights)',
                about="experts that are not called",
            )

    def tell(self) -> None:
        """Write events, and warn of routers that have collapsed. Collective."""
        counts = self._counts()
        self.total += counts
        collectives.all_reduce_sum(counts, self.engine.mesh.world, "tokens of experts")
        torch._foreach_zero_([counter.row for counter in self.counters])
        fullest, unused = 0.0, 0
        for layer, top, row in zip(self.layers, self._tops(), counts.tolist(), strict=True):
            if not any(row):
                continue
            tokens = sum(row) / top
            share = max(row[: layer.count]) / tokens
            unused += sum(each == 0 for each in row[: layer.count])
            fullest = max(fullest, share)
            if share >= _COLLAPSED and top / layer.count < _FAIR:
                warn_once(
                    f"the router of {layer.name} sends {share:.0%} of all tokens to expert "
                    f"{row.index(max(row[: layer.count]))}, and {top / layer.count:.0%} would be even: most of its "
                    "experts do not train, and the process that has this one computes for all. Raise the weight of "
                    "the model's loss of balance (router_aux_loss_coef, with output_router_logits), or lower the "
                    "learning rate",
                    about=f"balance of {layer.name}",
                )
        if self.engine.monitor.writes and fullest:
            samples = self.engine.global_samples
            events = [("fullest_share", fullest, samples), ("unused", float(unused), samples)]
            self.engine.monitor.write_events([(f"Train/Experts/{name}", *rest) for name, *rest in events])

    def told(self) -> list[dict[str, Any]]:
        """For a report: of each layer its name, how many processes divide it, experts of a token, and the routes of
        this process to each."""
        size = self.engine.mesh.shape.expert
        rows = (self.total + self._counts()).tolist()
        return [
            {"name": layer.name, "processes": size, "top": top or 1, "routes": row[: layer.count]}
            for layer, top, row in zip(self.layers, self._tops(), rows, strict=True)
        ]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def attach(engine: BalancedEngine) -> None:
    """Count from now on."""
    layers = plan_experts(engine.module, engine.settings.expert_parallel, engine.mesh.shape.expert)
    if not layers:
        return
    balance = Balance(engine, layers)
    engine.events.add(balance)
    engine.events.step_hooks.append(balance.after_step)
