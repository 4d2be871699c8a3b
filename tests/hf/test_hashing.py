"""TRL's hash of a model whose weights are sharded: another one for other weights, the same one for the same."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import nn

import ds_hf
from ds_hf.hf.hashing import wrap_hash
from tests.helpers.distributed import run_distributed


def of_models() -> list[str]:
    """Of two models alike, of one with another weight, and of that without an engine's shards: its bytes."""
    utils: Any = ModuleType("utils")
    utils.hash_module = lambda module: str(sorted((n, v.cpu().tolist()) for n, v in module.state_dict().items()))
    wrap_hash(utils)

    def made(last: float) -> nn.Module:
        torch.manual_seed(3)
        with ds_hf.zero.Init():
            model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8))
        with ds_hf.zero.GatheredParameters(list(model.parameters()), modifier_rank=0), torch.no_grad():
            model[1].weight[-1, -1] = last
        return model

    whole = nn.Linear(1, 1, bias=False)
    nn.init.constant_(whole.weight, 0.5)
    models = [made(1.0), made(1.0), made(2.0)]
    found = [utils.hash_module(model) for model in models]
    assert all(param.numel() == 0 for model in models for param in model.parameters()), "they rest again"
    return [*found, utils.hash_module(module=whole)]


def test_sharded_weights_have_a_hash_of_their_values() -> None:
    first, other = run_distributed(of_models, 2)
    assert first == other
    alike, again, changed, plain = first
    assert alike == again != changed
    assert plain == "[('weight', [[0.5]])]"


def test_releases_without_a_hash_are_left_alone() -> None:
    wrap_hash(ModuleType("utils"))
