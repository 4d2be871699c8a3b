"""Parameter groups that a script edits after ``initialize``, against plain torch whose groups are edited alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hf import Engine, initialize
from ds_hf.errors import DsHfError
from tests.engine.optim.test_unfreezing import Net, batch
from tests.helpers.distributed import run_distributed
from tests.helpers.parity import base_config, weight_error

RATES = (1e-2, 1e-1)
OPTIONS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-4},
    "SGD": {"lr": 1e-3, "momentum": 0.9},
}


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """The blocks at the first rate, the rest but for the last layer at the second; that is in no group."""
    named = list(model.named_parameters())
    blocks = [param for name, param in named if name.startswith("blocks")]
    return [
        {"params": blocks, "lr": RATES[0]},
        {"params": [param for name, param in named if name.startswith("first")], "lr": RATES[1]},
    ]


def move(optimizer: Any, params: list[Tensor], place: int, *, plain: bool) -> None:
    for group in optimizer.param_groups if plain else ():
        group["params"] = [each for each in group["params"] if all(each is not param for param in params)]
    optimizer.param_groups[place]["params"].extend(params)


def edit(model: Any, optimizer: Any, step: int, *, plain: bool) -> None:
    """A matrix and a bias go to the other group, a block to a new one, and the last layer joins; one is emptied."""
    if step == 1:
        move(optimizer, [model.blocks[1].fc.weight, model.blocks[0].norm.bias], 1, plain=plain)
    if step == 2:
        optimizer.add_param_group({"params": list(model.last.parameters()), "lr": 0.05})
    if step == 3:
        params = [*model.blocks[2].parameters(), model.first.weight]
        for group in optimizer.param_groups if plain else ():
            group["params"] = [each for each in group["params"] if all(each is not param for param in params)]
        optimizer.param_groups.append({**optimizer.param_groups[0], "params": params, "lr": 0.03})
    if step == 4:
        move(optimizer, [p for name in (0, 1) for p in model.blocks[name].parameters()], 2, plain=plain)
    if step == 5:
        if not plain:
            assert optimizer.param_groups[0]["params"] == []
        del optimizer.param_groups[0]


def engine_of(stage: int, rule: str = "AdamW", **more: Any) -> Engine:
    config = base_config(stage, optimizer={"type": rule, "params": OPTIONS[rule]}, **more)
    model = Net()
    return initialize(model=model, model_parameters=groups_of(model), config=config)[0]


def as_plain(cases: list[tuple[int, str, dict[str, Any]]]) -> None:
    for stage, rule, zero in cases:
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **zero}
        plain, engine = Net(), engine_of(stage, rule, zero_optimization=zero)
        theirs: Any = getattr(torch.optim, rule)(groups_of(plain), **OPTIONS[rule])
        for step in range(8):
            edit(plain, theirs, step, plain=True)
            edit(engine.module, engine.optimizer, step, plain=False)
            plain.zero_grad()
            for rank in range(2):
                (plain(batch(step, 0, rank)) / 2).backward()
            theirs.step()
            engine.backward(engine(batch(step, 0, dist.get_rank())))
            engine.step()
            assert weight_error(engine.module, plain) < 2e-5, (stage, rule, step)
        names = {id(param): name for name, param in plain.named_parameters()}
        mine = [sorted(engine.param_names[id(p)] for p in params) for params in engine.optimizer.bit16_groups]
        assert mine == [sorted(names[id(p)] for p in group["params"]) for group in theirs.param_groups]
        engine.destroy()


def test_as_plain_torch() -> None:
    cases = [(0, "SGD", {}), (1, "AdamW", {}), (3, "AdamW", {}), (2, "SGD", {"offload_optimizer": {"device": "cpu"}})]
    run_distributed(as_plain, 2, cases, timeout=60)


def told() -> None:
    """What says nothing about a parameter is refused, by name, and stays refused until it is undone."""
    engine = engine_of(1)
    optimizer = engine.optimizer
    assert optimizer is not None
    first, second = (list(group["params"]) for group in optimizer.param_groups)

    def stopped(match: str, restore: Any) -> None:
        for _ in range(2):
            with pytest.raises(DsHfError, match=match):
                engine(batch(0, 0, 0))
        restore()
        engine.backward(engine(batch(0, 0, 0)))
        engine.step()

    def restore() -> None:
        optimizer.param_groups[0]["params"][:], optimizer.param_groups[1]["params"][:] = first, second

    optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"].pop())
    stopped(r"the stretch of blocks\.\d.* was put into group 1.*param_groups\[1\]\['params'\]\.append", restore)
    optimizer.param_groups[1]["params"].clear()
    stopped(r"the stretch of first.* is in no parameter group any more", restore)
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.zeros(3)))
    stopped(r"shape \(3,\) that is no parameter of the engine's model", restore)
    for group in optimizer.param_groups:
        group["params"].append(engine.module.last.weight)
    stopped(r"last\.weight was put into parameter groups 0 and 1: choose one", restore)
    group = optimizer.param_groups.pop()
    stopped(r"the parameter group of first\.weight is gone", lambda: optimizer.param_groups.append(group))
    engine.destroy()
    one_bit = {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 2}}
    model = Net()
    engine = initialize(model=model, model_parameters=groups_of(model), config=base_config(0, optimizer=one_bit))[0]
    engine.optimizer.param_groups[1]["params"].append(model.blocks[0].fc.weight)
    with pytest.raises(DsHfError, match=r"groups were edited after initialize\(\): OnebitAdam"):
        engine(batch(0, 0, 0))
    engine.destroy()


def test_told() -> None:
    run_distributed(told, 1, timeout=30)
