"""Experts that are modules of their own, of which each process makes and holds some: those of DeepSpeed's layer.

A process makes as many experts as it will hold, named from 0. When an engine is made and the processes are known, they
get their numbers in the layer for names: ``deepspeed_experts.2`` and ``.3`` on the second of two processes that divide
four. Names are then different for different experts, as in a model of one process, so that checkpoints of any division
are read by any other. ``deepspeed_experts[0]`` stays the first that is here.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ds_hf.engine.comm.mesh import Axis, Mesh
from ds_hf.engine.parallel.experts.compute import weigh
from ds_hf.engine.parallel.experts.dispatch import dispatched
from ds_hf.engine.parallel.experts.exchange import outside_graphs
from ds_hf.engine.parallel.tensor.functions import Place
from ds_hf.engine.zero.buffer import home_of, leave_home, unshard
from ds_hf.engine.zero.init import shard_again
from ds_hf.engine.zero.leaf import set_z3_leaf_module
from ds_hf.engine.zero.replicas import divide_over_experts
from ds_hf.errors import ConfigError

__all__ = ["SeparateExperts", "place_experts", "separate_experts"]

_NAME = re.compile(r"ep_size_(\d+)")


class _Numbered(nn.ModuleList):
    """A list whose modules are named from a number on, and counted from 0."""

    def number_from(self, first: int) -> None:
        modules = list(self._modules.values())
        self._modules.clear()
        self._modules.update((str(first + index), module) for index, module in enumerate(modules))

    def _get_abs_string_index(self, idx: Any) -> str:
        return list(self._modules)[int(super()._get_abs_string_index(idx))]  # type: ignore[no-untyped-call]


class SeparateExperts(nn.Module):
    """The experts of a layer that this process holds: copies of one, each with parameters of its own.

    Args:
        expert: what maps ``[..., width]`` to the same shape, row by row.
        num_local_experts: how many of the layer's experts a process holds.
        expert_group_name: ``ep_size_N``, where ``N`` processes divide them; ``None`` for one.

    Attributes:
        ep_size: that ``N``.
        number: how many experts the layer has on all of them.
    """

    def __init__(self, expert: nn.Module, num_local_experts: int = 1, expert_group_name: str | None = None) -> None:
        super().__init__()
        named = _NAME.fullmatch(expert_group_name or "ep_size_1")
        if named is None:
            raise ConfigError(f"expert_group_name is {expert_group_name!r}, not ep_size_N", "Experts(...)")
        self.ep_size = int(named[1])
        self.num_local_experts = num_local_experts
        self.number = num_local_experts * self.ep_size
        self._place: Place | None = None  # before the processes are known
        self.deepspeed_experts = _Numbered(copy.deepcopy(expert) for _ in range(num_local_experts))
        self.mark()

    def mark(self) -> None:
        """Say of each parameter whose it is; copies of parameters do not keep marks."""
        for param in self.parameters():
            param.allreduce = False  # type: ignore[attr-defined]
            param.group_name = f"ep_size_{self.ep_size}"  # type: ignore[attr-defined]

    def place(self, mesh: Mesh, name: str = "experts") -> None:
        """Take the processes of ``mesh`` that divide the layer: names, and marks for what holds the same. Collective.

        Raises:
            ConfigError: so many do not divide the processes that hold the same parameters.
        """
        if self.ep_size == 1:
            return
        try:
            parts, same = mesh.experts_over(self.ep_size)
        except ValueError as error:
            raise ConfigError(f"{name} is divided over {self.ep_size} processes: {error}", "MoE(ep_size=...)") from None
        self._place = Place(parts, name, [None])
        self.deepspeed_experts.number_from(parts.rank * self.num_local_experts)
        set_z3_leaf_module(self, True)
        self.mark()
        for param in self.parameters():
            divide_over_experts(param, self.ep_size)
            _keep_among(param, same)

    def forward(self, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of what the experts give. Collective.

        Args:
            hidden: ``[..., width]``.
            indices: ``[..., k]``: experts by their number in the layer; other numbers stand for none.
            weights: ``[..., k]``.
        """
        place = self._place
        if place is None and self.ep_size > 1 and not hidden.is_meta:
            raise ConfigError(
                f"the layer's {self.number} experts are divided over {self.ep_size} processes, which "
                "deepspeed.initialize() makes known: call it before the model runs",
                "MoE(ep_size=...)",
            )
        place = place or Place(Axis(None, 0, self.ep_size), "experts", [None])
        return outside_graphs(dispatched)(hidden, indices, weights, self.number, place, self._compute)

    def _compute(self, x: Tensor, experts: Tensor, scale: Tensor, ends: Tensor) -> Tensor:
        """What each expert gives for its rows, times their weights; one without rows runs a row of zeros, so that its
        parameters have gradients on all processes. Rows have the dimensions that they have in DeepSpeed's layer."""
        count = self.num_local_experts
        if x.is_meta:
            rows = [len(x) // count + (index < len(x) % count) for index in range(count)]
        else:
            rows = ends.diff(prepend=ends.new_zeros(1)).tolist()
        results = []
        for expert, part in zip(self.deepspeed_experts, torch.split(x, rows), strict=True):
            given = part if len(part) else x.new_zeros(1, x.shape[1])
            result = expert(given[None, None])
            result = result[0] if isinstance(result, tuple) else result  # beside it a bias, in Megatron-LM
            results.append(result.reshape(-1, x.shape[1])[: len(part)])
        result = torch.cat(results)
        return weigh(result, scale)


@torch.no_grad()
def _keep_among(param: nn.Parameter, same: Axis) -> None:
    """Divide a parameter that was built under ``zero.Init`` over those that hold the same expert. Collective."""
    home = home_of(param)
    if home is None or not home.buffer.sharded or home.buffer.axis == same:
        return
    buffer = home.buffer
    with unshard([buffer]):
        values = param.data.clone(memory_format=torch.contiguous_format)
    leave_home(param)
    param.data = values
    shard_again(param, same, like=buffer)


def separate_experts(model: nn.Module) -> Iterator[tuple[str, SeparateExperts]]:
    """Those of the model, by name."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, SeparateExperts))


def place_experts(model: nn.Module, mesh: Mesh) -> None:
    """``SeparateExperts.place`` for all that there are in ``model``. Collective.

    Raises:
        ConfigError: see there.
    """
    for name, experts in list(separate_experts(model)):
        experts.place(mesh, name)
