"""Every model of the zoo trains as in plain torch, at every stage, on one, two and more processes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.engine.zero.zoo import WIDTH, ZOO
from tests.helpers.distributed import run_distributed
from tests.helpers.parity import base_config, sgd, train_both

STEPS = 2
TOLERANCE = 1e-5
SGD = {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}


def train(name: str, accumulation: int) -> dict[int, float]:
    """Worst relative error of the case at each stage."""
    case = ZOO[name]
    data = torch.randn(STEPS, accumulation, dist.get_world_size(), 4, WIDTH, generator=torch.Generator().manual_seed(3))
    worst = {}
    for stage in range(4):
        torch.manual_seed(11)
        config = base_config(stage, optimizer=SGD, gradient_clipping=0.5)
        outcome = train_both(case.make(), case.loss, data, config, reference_optimizer=sgd, same=name)
        worst[stage] = outcome.worst
    return worst


def train_all(names: list[str], accumulation: int) -> dict[tuple[str, int], float]:
    """Worst relative error of each case at each stage; starting processes costs more than training."""
    errors = {}
    for name in names:
        print("case", name)
        errors |= {(name, stage): error for stage, error in train(name, accumulation).items()}
    return errors


NAMES = list(ZOO)
UNEVEN = ["stack", "odd_parameters", "lora", "frozen_albert", "detached_use"]
GROUPS = [NAMES[start::4] for start in range(4)]


# One process is quick by itself, and what two find it finds as a rule.
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("names", GROUPS, ids=lambda names: f"{names[0]}+{len(names) - 1}")
def test_trains_as_torch_does(names: list[str], world: int) -> None:
    for errors in run_distributed(train_all, world, names, 2, timeout=100):
        assert not {case: error for case, error in errors.items() if not error < TOLERANCE}


@pytest.mark.parametrize("world", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_trains_on_uneven_shards(world: int) -> None:
    for errors in run_distributed(train_all, world, UNEVEN, 1, timeout=100):
        assert not {case: error for case, error in errors.items() if not error < TOLERANCE}
