"""What is said about models that every process holds whole, and about arguments beside the configuration's sections."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_hf import initialize
from ds_hf.engine.builder import whole_model_advice
from ds_hf.log import forget_said
from tests.helpers.parity import base_config


def parameter(nbytes: int) -> torch.Tensor:
    """A parameter that counts as ``nbytes`` and has four."""
    return torch.empty(1).expand(nbytes // 4)


def test_advice_has_the_cost_and_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    advice = whole_model_advice([parameter(10 << 30), parameter(4 << 30)], 16)
    assert advice is not None
    assert "14.0 GiB" in advice
    assert "8 processes on this host: 112.0 GiB" in advice
    assert "a shard is 0.9 GiB" in advice
    assert "TrainingArguments before from_pretrained()" in advice


def test_no_advice_where_the_cost_is_small_or_has_to_be() -> None:
    assert whole_model_advice([parameter(1 << 20)], 8) is None
    assert whole_model_advice([parameter(10 << 30)], 1) is None


@pytest.mark.parametrize("called", [True, False])
def test_an_optimizer_or_schedule_beside_those_of_the_file_is_told(
    caplog: pytest.LogCaptureFixture, called: bool
) -> None:
    def half(optimizer: Any) -> torch.optim.lr_scheduler.StepLR:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    model = torch.nn.Linear(2, 1)
    section = {"type": "WarmupCosineLR", "params": {"total_num_steps": 9}}
    by_function: Any = lambda params: torch.optim.SGD(params, lr=0.25)  # noqa: E731
    optimizer = by_function if called else by_function(model.parameters())
    schedule: Any = half if called else half(optimizer)
    forget_said()
    engine, *_ = initialize(
        model=model, optimizer=optimizer, lr_scheduler=schedule, config=base_config(0, scheduler=section)
    )
    rates = []
    for _ in range(3):
        rates += engine.get_lr()
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
    engine.destroy()
    assert rates == [0.25, 0.125, 0.0625]
    assert "the optimizer given to initialize() replaces the configuration's 'AdamW'" in caplog.text
    assert "the lr_scheduler given to initialize() replaces the configuration's 'WarmupCosineLR'" in caplog.text
