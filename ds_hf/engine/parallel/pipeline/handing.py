"""What a layer takes along to another stage: its values, and what was set since it was built."""

from __future__ import annotations

from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hf.engine.comm.mesh import Axis
from ds_hf.errors import ConfigError

__all__ = ["hand_over", "set_alike"]


class _Set(NamedTuple):
    """What may have been set in a layer since it was built."""

    values: dict[str, tuple[torch.dtype, bool]]  # of parameters and buffers, and whether they train
    training: dict[str, bool]  # of modules inside

    @classmethod
    def of(cls, module: nn.Module) -> _Set:
        values = {name: (value.dtype, value.requires_grad) for name, value in _values(module).items()}
        return cls(values, {name: inner.training for name, inner in module.named_modules()})

    def fits(self, module: nn.Module) -> bool:
        """Whether ``module`` has the same parameters, buffers and modules."""
        other = _Set.of(module)
        return self.values.keys() == other.values.keys() and self.training.keys() == other.training.keys()

    def put(self, module: nn.Module) -> None:
        """Set it in ``module``, whose values are lost."""
        for name, inner in module.named_modules():
            inner.training = self.training[name]
        for name, value in _values(module).items():
            dtype, trains = self.values[name]
            value.data = torch.empty_like(value, dtype=dtype)
            value.requires_grad_(trains)


def _values(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def hand_over(module: nn.Module, axis: Axis, source: int, target: int) -> None:
    """Bring the values of a layer from one stage to another; both call it, each with its own copy."""
    for value in _values(module).values():
        if axis.rank == source:
            dist.send(value.detach().contiguous(), axis.global_rank(target), group=axis.group)
        else:
            dist.recv(value.data, axis.global_rank(source), group=axis.group)


def set_alike(held: dict[int, nn.Module], now: dict[int, nn.Module], axis: Axis) -> None:
    """Layers that were built anew are as those of the stages that had them: frozen, cast, in evaluation mode.

    Args:
        held, now: the layers of this stage by number, before and after they were divided anew.
        axis: of the stages, which call it together.

    Raises:
        ConfigError: on all stages, where a layer has other parameters or modules by now, which nothing builds anew.
    """
    told: list[Any] = [None] * axis.world_size
    dist.all_gather_object(told, {index: _Set.of(module) for index, module in held.items()}, group=axis.group)
    before = {index: state for each in told for index, state in each.items()}
    new = {index: module for index, module in now.items() if index not in held and index in before}
    changed: list[Any] = [None] * axis.world_size
    dist.all_gather_object(changed, [i for i, module in new.items() if not before[i].fits(module)], group=axis.group)
    if any(changed):
        raise ConfigError(
            f"layers {sorted(chain(*changed))} go to other stages, where they are built anew, and have been changed "
            "since the model was made (adapters, say): make the model with its chunks, PipelineModule(..., chunks=)",
            "/ds_hf/pipeline/chunks",
        )
    for index, module in new.items():
        before[index].put(module)
