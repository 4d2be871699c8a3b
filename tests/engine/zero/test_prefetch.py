"""What is gathered ahead, in which order, and what is given back unused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ds_hf import initialize
from ds_hf.engine import builder
from ds_hf.engine.dist import collectives
from ds_hf.engine.zero.buffer import ParamStatus
from ds_hf.engine.zero.gather import GatheredParameters
from ds_hf.engine.zero.prefetch import Prefetch
from tests.engine.zero.zoo import WIDTH, Stack, mean_square
from tests.helpers.distributed import run_distributed


class FakeBuffer:
    stays = True


class FakeUnit:
    sharded = True
    depth = 0

    def __init__(self, name: str, numel: int = 10, log: list[str] | None = None) -> None:
        self.name, self.numel = name, numel
        self.log = [] if log is None else log
        self.here = False
        self.buffers = [FakeBuffer()]

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


# -- in the optimizer's step ------------------------------------------------------------------------------------------


def test_the_step_begins_the_next_forward() -> None:
    log: list[str] = []
    root, a, b = units(log, a=10, b=10)
    prefetch = Prefetch(in_step=True)
    prefetch.step(())
    assert log == [], "before an order is known"
    prefetch.follow([root, a, b])  # type: ignore[list-item]
    prefetch.step([*root.buffers, *a.buffers])  # type: ignore[arg-type]
    assert log == [], "they have old values"
    prefetch.step(a.buffers)  # type: ignore[arg-type]
    assert log == ["+"]
    prefetch.step(())
    prefetch.reset()
    assert log == ["+", "+a"]
    prefetch.forward(root)  # type: ignore[arg-type]
    prefetch.forward(a)  # type: ignore[arg-type]
    assert log == ["+", "+a", "+b"]
    prefetch.drop()
    assert log == ["+", "+a", "+b", "-b"]
    a.here = False
    a.buffers[0].stays = False  # in files
    prefetch.step(())
    assert log[4:] == []
    small = Prefetch(max_live=19, in_step=True)
    small.follow([root, a, b])  # type: ignore[list-item]
    assert [unit.name for unit in small._first] == ["", "a"]
    unused = Prefetch(enabled=False, in_step=True)
    unused.follow([root, a, b])  # type: ignore[list-item]
    assert unused._first == []


class InStep(Prefetch):
    """As on a GPU."""

    def __init__(self, enabled: bool, max_live: int | None, *, in_step: bool) -> None:
        super().__init__(enabled, max_live, in_step=True)


def on_the_cpu(run: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """What ``run`` finds without and with gathers in the step."""
    expected = run(*args)
    builder.Prefetch = InStep  # type: ignore[attr-defined, misc]
    found = run(*args)
    builder.Prefetch = Prefetch  # type: ignore[attr-defined, misc]
    return expected, found


def gathers_in_the_step() -> None:
    late, early = on_the_cpu(order_of_gathers, 1)
    first, alone = ["the model's root", "blocks.0"], ["the model's root", "alone"]
    assert late[-2:] == alone
    assert early == [*late[2:-2], *first, "alone"], (early, late)


def test_engine_gathers_in_the_step() -> None:
    run_distributed(gathers_in_the_step, 2, timeout=60)


def trained(optimizer: dict[str, Any], accumulation: int, offload: bool, watched: bool) -> list[torch.Tensor]:
    """Losses and weights of a training in which parameters are looked at, written and forgotten between steps."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": 3, **({"offload_optimizer": {"device": "cpu"}} if offload else {})},
        "optimizer": optimizer,
        "bf16": {"enabled": offload},
    }
    torch.manual_seed(0)
    engine = initialize(model=Stack(), config=config)[0]
    if watched:
        engine.optimizer.register_step_post_hook(lambda *_: None)  # the optimizer's own step() then
    losses = []
    for step in range(6):
        for micro in range(accumulation):
            seed = 100 * step + 10 * micro + dist.get_rank()
            x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed))
            loss = mean_square(engine(x.bfloat16() if offload else x))
            engine.backward(loss)
            engine.step()
        losses.append(loss.detach().float())
        params = list(engine.module.parameters())
        away = [p for p in params if p.ds_status is not ParamStatus.AVAILABLE]
        assert {p.numel() for p in away} == {0}
        assert len(away) > 4
        if step == 1:
            with GatheredParameters(params, modifier_rank=0), torch.no_grad():
                params[0].mul_(0.5)
            assert [p for p in params if p.ds_status is not ParamStatus.AVAILABLE] == away
        if step == 2:
            engine.empty_partition_cache()
        if step == 3:
            with torch.no_grad():
                losses.append(mean_square(engine(x.bfloat16() if offload else x)).float())
        if step == 4 and not offload:
            engine.offload_states()
            engine.reload_states()
    with GatheredParameters(params):
        found = [*losses, *(p.detach().clone() for p in params)]
    engine.destroy()
    return found


def training_is_the_same() -> None:
    adam = {"type": "AdamW", "params": {"lr": 0.01}}
    lamb = {"type": "Lamb", "params": {"lr": 0.01}}
    for case in ((adam, 1, False, False), (adam, 3, False, False), (adam, 1, True, False), (adam, 1, False, True),
                 (lamb, 1, False, False)):  # fmt: skip
        expected, found = on_the_cpu(trained, *case)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), case


def test_training_is_the_same() -> None:
    run_distributed(training_is_the_same, 2, timeout=100)
