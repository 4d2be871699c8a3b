"""Gradients that users write, clear and scale themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ds_hf.engine.builder import initialize
from ds_hf.engine.engine import Engine
from ds_hf.engine.zero.access import safe_get_full_grad
from tests.helpers.distributed import run_distributed
from tests.helpers.parity import base_config

SGD = {"type": "SGD", "params": {"lr": 1.0}}


def make(stage: int, **more: Any) -> Engine:
    model = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(model.weight)
    return initialize(model=model, config=base_config(stage, optimizer=SGD, **more))[0]


def written_by_hand() -> None:
    """``param.grad = ...; engine.step()`` without any backward; also with a loss scale, which they carry."""
    for stage in (0, 1, 2):
        engine = make(stage)
        engine.module.weight.grad = torch.tensor([[1.0, 2.0, 3.0]]) * (1 + dist.get_rank())
        engine.step()
        mean = (1 + dist.get_world_size()) / 2
        assert engine.module.weight.tolist() == [[-1.0 * mean, -2.0 * mean, -3.0 * mean]]
        assert engine.module.weight.grad is None
    engine = make(0, fp16={"enabled": True, "initial_scale_power": 2, "loss_scale_window": 2, "hysteresis": 1})
    for value, scale in ((float("inf"), 2.0), (2.0, 2.0), (2.0, 2.0), (2.0, 4.0)):
        engine.module.weight.grad = torch.full((1, 3), value, dtype=torch.float16)
        engine.step()
        assert engine.loss_scale() == scale
    assert engine.module.weight.tolist() == [[-3.0] * 3]


@pytest.mark.parametrize("world", [1, 2])
def test_written_by_hand(world: int) -> None:
    run_distributed(written_by_hand, world, timeout=60)


def two_backwards() -> None:
    """Two losses of one forward: ``zero_grad()`` between them keeps their gradients apart."""
    for stage in (0, 1, 2, 3):
        for by_hand in (False, True):
            engine = make(stage)
            output = engine(torch.tensor([[1.0, 2.0, 4.0]]))
            found = []
            for factor, keep in ((1.0, True), (10.0, False)):
                engine.zero_grad()
                if by_hand:
                    engine.scale((output * factor).sum(), retain_graph=keep).backward(retain_graph=keep)
                else:
                    engine.backward((output * factor).sum(), retain_graph=keep)
                gradient = safe_get_full_grad(engine.module.weight)
                assert gradient is not None
                found.append(gradient.flatten().tolist())
            assert found == [[1.0, 2.0, 4.0], [10.0, 20.0, 40.0]]


def test_two_backwards() -> None:
    run_distributed(two_backwards, 2, timeout=60)
