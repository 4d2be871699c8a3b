"""What ``builder`` hands to the engine: the parts of one training set-up, already wired to each other."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ds_hf.config.plan import StatePlan
from ds_hf.engine.dist.mesh import Mesh
from ds_hf.engine.optim.sharded import ShardedOptimizer
from ds_hf.engine.zero.hooks import UnitHooks
from ds_hf.engine.zero.reduction import Reducer
from ds_hf.engine.zero.unit import Unit

__all__ = ["EngineParts"]


@dataclass(frozen=True)
class EngineParts:
    """Attributes:
    plan: the state plan. mesh: the processes. device: where the model computes.
    compute_dtype: 16-bit dtype of the model, ``None`` when it keeps its own.
    units, reducer, hooks, optimizer: see their modules.
    param_names: id of each parameter -> its first name in the model.
    """

    plan: StatePlan
    mesh: Mesh
    device: torch.device
    compute_dtype: torch.dtype | None
    units: list[Unit]
    reducer: Reducer
    hooks: UnitHooks
    optimizer: ShardedOptimizer | None
    param_names: dict[int, str]
