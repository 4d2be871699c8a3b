"""What ZenFlow is refused beside, as far as the engine alone knows it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ds_hf import initialize
from ds_hf.errors import ConfigError
from tests.contract.test_parity import ADAMW, MICRO, model
from tests.contract.test_zenflow import CPU, EVERY, engine_of
from tests.helpers.distributed import run_distributed


def engine_with(make: Any, **config: Any) -> Any:
    made = model()
    zero = {"stage": 2, "offload_optimizer": CPU, "zenflow": EVERY}
    given = {"train_micro_batch_size_per_gpu": MICRO, "zero_optimization": zero, "zero_force_ds_cpu_optimizer": False}
    return initialize(model=made, optimizer=make(list(made.parameters())), config={**given, **config})[0]


def hooked(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(params, **ADAMW)  # type: ignore[arg-type]
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def refused() -> None:
    def sgd(params: Any) -> Any:
        return torch.optim.SGD(params, lr=0.1)

    def amsgrad(params: Any) -> Any:
        return torch.optim.AdamW(params, amsgrad=True)

    for make, name in ((sgd, "SGD"), (amsgrad, "AdamW"), (hooked, "AdamW")):
        with pytest.raises(ConfigError, match=f"ZenFlow keeps moments of Adam, which {name}"):
            engine_with(make)
    with pytest.raises(ConfigError, match="mics_shard_size"):
        engine_of(EVERY, 2, zero={"mics_shard_size": 1})
    engine_with(lambda params: torch.optim.AdamW(params, **ADAMW)).destroy()


def test_what_is_refused() -> None:
    run_distributed(refused, 2, timeout=60)
