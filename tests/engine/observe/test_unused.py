"""``ignore_unused_parameters: false``: what trains without a gradient is told of, and nothing else is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ds_hf
from ds_hf.errors import ConfigError, DsHfError
from tests.helpers.distributed import run_distributed
from tests.helpers.parity import base_config


class Choice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, chosen: list[int]) -> Tensor:
        for index in chosen:
            x = self.layers[index](x)
        return x.square().mean()


def _steps(stage: int, size: int) -> list[str]:
    """What steps say, of an accumulation over two micro-batches that use the given layers."""
    torch.manual_seed(0)
    model = Choice()
    zero = {"stage": stage, "ignore_unused_parameters": False, "stage3_param_persistence_threshold": 0}
    config = base_config(size, gradient_accumulation_steps=2, zero_optimization=zero)
    config.pop("train_batch_size", None)
    engine: Any = ds_hf.initialize(model=model, config=config)[0]
    said = []
    for first, second, frozen in ([0], [1, 2], False), ([0, 1, 2], [0], False), ([0], [1], True), ([0], [1], False):
        for param in model.layers[2].parameters():
            param.requires_grad_(not frozen)
        told = "nothing"
        for chosen in (first, second):
            engine.backward(engine(torch.randn(2, 4), chosen))
            try:
                engine.step()
            except DsHfError as error:
                told = str(error)
        said.append(told)
    engine.destroy()
    return said


@pytest.mark.parametrize("stage", range(4))
def test_each_step_is_judged_by_all_its_micro_batches(stage: int) -> None:
    for said in run_distributed(_steps, 2, stage, 2, timeout=60):
        assert said[:3] == ["nothing"] * 3
        assert said[3].startswith("no gradient reached layers.2.weight, layers.2.bias in this step")
        assert isinstance(DsHfError(), AssertionError)  # what DeepSpeed raises


def test_it_cannot_see_into_captured_blocks() -> None:
    more = {"zero_optimization": {"stage": 2, "ignore_unused_parameters": False}, "ds_hf": {"capture": "blocks"}}
    with pytest.raises(ConfigError, match="captured blocks"):
        ds_hf.initialize(model=nn.Linear(2, 1), config=base_config(1, **more))
