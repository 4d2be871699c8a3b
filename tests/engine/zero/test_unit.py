"""What is gathered ahead, in which order, and what is given back unused."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ds_hf import initialize
from ds_hf.engine.comm import collectives
from ds_hf.engine.zero.unit import Prefetch
from tests.engine.zero.zoo import WIDTH, Stack, mean_square
from tests.helpers.distributed import run_distributed


class FakeUnit:
    sharded = True
    depth = 0

    def __init__(self, name: str, numel: int = 10, log: list[str] | None = None) -> None:
        self.name, self.numel = name, numel
        self.log = [] if log is None else log
        self.here = False

    def start_gather(self) -> bool:
        began, self.here = not self.here, True
        if began:
            self.log.append(f"+{self.name}")
        return began

    def release(self) -> None:
        self.here = False
        self.log.append(f"-{self.name}")


def units(log: list[str], **numels: int) -> list[FakeUnit]:
    return [FakeUnit("", log=log), *(FakeUnit(name, numel, log) for name, numel in numels.items())]


def test_one_ahead_in_both_directions() -> None:
    log: list[str] = []
    root, a, b, c = units(log, a=10, b=10, c=10)
    prefetch = Prefetch()
    prefetch.forward(a)  # type: ignore[arg-type]
    assert log == [], "before an order is known"
    prefetch.follow([root, a, b, c])  # type: ignore[list-item]
    assert prefetch.last is c  # type: ignore[comparison-overlap]
    for unit in (root, a, b, c):
        unit.start_gather()
        prefetch.forward(unit)  # type: ignore[arg-type]
    assert log == ["+", "+a", "+b", "+c"]
    for unit in (root, a, b, c):
        unit.release()
    log.clear()
    for unit in (c, b, a):
        unit.start_gather()
        prefetch.backward(unit)  # type: ignore[arg-type]
    assert log == ["+c", "+b", "+a"]
    prefetch.drop()
    assert log == ["+c", "+b", "+a"], "all were used"


def test_unused_is_given_back() -> None:
    log: list[str] = []
    root, a, b = units(log, a=10, b=10)
    prefetch = Prefetch()
    prefetch.follow([root, a, b])  # type: ignore[list-item]
    a.start_gather()
    prefetch.forward(a)  # type: ignore[arg-type]
    prefetch.drop()
    assert log == ["+a", "+b", "-b"]


def test_limits() -> None:
    for prefetch in (Prefetch(enabled=False), Prefetch(max_live=19)):
        log: list[str] = []
        root, a, b = units(log, a=10, b=10)
        prefetch.follow([root, a, b])  # type: ignore[list-item]
        a.start_gather()
        prefetch.forward(a)  # type: ignore[arg-type]
        assert log == ["+a"]


def order_of_gathers(bucket: int) -> list[str]:
    """Labels of the all-gathers of a step, and of uses, as they come."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": bucket},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    }
    torch.manual_seed(0)
    engine = initialize(model=Stack(), config=config)[0]
    seen: list[str] = []
    gather = collectives.all_gather

    def noted(full: torch.Tensor, shard: torch.Tensor, axis: object, what: str = "") -> None:
        seen.append(what.removeprefix("the weights of "))
        gather(full, shard, axis, what)  # type: ignore[arg-type]

    for index, block in enumerate(engine.module.blocks):
        block.up.register_forward_pre_hook(lambda *_, index=index: seen.append(f"use {index}"))
    x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    for step in range(2):
        collectives.all_gather = noted if step else gather  # type: ignore[assignment]
        seen.clear()
        engine.backward(mean_square(engine(x)))
        engine.step()
    engine.hooks.keep_root()
    seen.append("alone")
    if dist.get_rank() == 0:  # as PEFT computes what it saves of a prompt encoder
        engine.module.inlet(x)
    collectives.all_gather = gather
    engine.destroy()
    return seen


def test_engine_gathers_the_next_block_before_one_runs() -> None:
    ahead = ["the model's root", "blocks.0", "blocks.1", "use 0", "blocks.2", "use 1", "use 2", "blocks.1", "blocks.0"]
    alone = ["the model's root", "alone"]
    for rank in run_distributed(order_of_gathers, 2, 1, timeout=60):
        assert rank == [*ahead, *alone]
    late = ["the model's root", "blocks.0", "use 0", "blocks.1", "use 1", "blocks.2", "use 2", "blocks.1", "blocks.0"]
    for rank in run_distributed(order_of_gathers, 2, 0, timeout=60):
        assert rank == [*late, *alone]
