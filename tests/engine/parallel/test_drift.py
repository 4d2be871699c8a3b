"""Settings that part on processes after ``initialize`` are told; what all change alike, or may differ in, is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ds_hf import initialize
from ds_hf.log import forget_said, logger
from tests.engine.optim.test_unfreezing import Net, batch
from tests.helpers.distributed import run_distributed
from tests.helpers.logs import Lines
from tests.helpers.parity import base_config


def set_rate(engine: Any) -> None:
    engine.optimizer.param_groups[0]["lr"] = 0.5


def freeze(engine: Any) -> None:
    engine.module.blocks[1].fc.weight.requires_grad_(False)


def clip(engine: Any) -> None:
    engine.optimizer.clip_grad = 0.25


def regroup(engine: Any) -> None:
    engine.optimizer.add_param_group({"params": [engine.module.last.bias], "lr": 1e-2})


def forget_to_train(engine: Any) -> None:
    engine.eval()


CHANGES: list[tuple[Callable[[Any], None], str]] = [
    (set_rate, "param_groups[0].lr is 0.01 on rank 0 and 0.5 on rank 1"),
    (freeze, "blocks.1.fc.weight.requires_grad is True on rank 0 and False on rank 1"),
    (clip, "gradient_clipping is 0.0 on rank 0 and 0.25 on rank 1"),
    (regroup, "param_groups[0]['params'] is 22 parameters"),
    (forget_to_train, "model.training is True on rank 0 and False on rank 1"),
]


def parted(stage: int, change: Callable[[Any], None], step: int, *, alike: bool, steps: int = 7) -> list[str]:
    """What rank 1 tells after ``change`` before ``step``."""
    forget_said()
    logger.addHandler(lines := Lines())
    engine = initialize(model=(model := Net()), model_parameters=model.parameters(), config=base_config(stage))[0]
    schedule = torch.optim.lr_scheduler.ExponentialLR(engine.optimizer, 0.9) if alike else None
    for number in range(steps):
        if number == step and (alike or dist.get_rank()):
            change(engine)
        engine.backward(engine(batch(number, 0, dist.get_rank())))
        engine.step()
        if schedule is not None:
            schedule.step()
        dist.barrier()  # what the first process left is there
    engine.destroy()
    logger.removeHandler(lines)
    return [text for text in lines.texts if "Each process trains with its own" in text]


def every_change() -> None:
    for number, (change, text) in enumerate(CHANGES):
        told = parted(number % 4, change, 1 + number % 2, alike=False)
        assert len(told) == dist.get_rank(), (text, told)
        assert all(text in each for each in told), (text, told)
        assert parted((number + 1) % 4, change, 2, alike=True) == [], text


def test_changes_on_one_process() -> None:
    run_distributed(every_change, 2, timeout=60)


def seldom() -> None:
    """After many steps too, at one of the steps at which processes compare; the store keeps but a few of them."""
    told = parted(1, set_rate, 70, alike=False, steps=140)
    assert [text.partition(":")[0] for text in told] == ["before step 128"] * dist.get_rank()


def test_after_many_steps() -> None:
    run_distributed(seldom, 2, timeout=30)
