"""Columns that are chosen again once an epoch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_hf import initialize
from ds_hf.errors import ConfigError
from tests.contract.test_parity import MICRO, VOCAB, model
from tests.helpers.distributed import run_distributed


def chosen_every(section: dict[str, Any], data: bool) -> int:
    engine, *_ = initialize(
        model=model(),
        training_data=list(torch.randint(0, VOCAB, (24, 8))) if data else None,
        config={
            "train_micro_batch_size_per_gpu": MICRO,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "zenflow": section},
        },
    )
    found = int(engine.optimizer.store.rounds.choose_every)
    engine.destroy()
    return found


def epochs() -> None:
    assert chosen_every({}, data=True) == 6  # 12 batches, two a step
    assert chosen_every({}, data=False) == 0
    assert chosen_every({"steps_per_epoch": 40}, data=True) == 40
    assert chosen_every({"select_strategy": "epoch", "select_interval": 3}, data=True) == 18
    assert chosen_every({"select_strategy": "step", "select_interval": 5}, data=True) == 5
    with pytest.raises(ConfigError, match="every 7 steps, and an epoch has 6"):
        chosen_every({"update_interval": 7}, data=True)


def test_epochs() -> None:
    run_distributed(epochs, 1, timeout=60)
