"""Steps whose gradient norm is not finite: warned of once, skipped, or an error, alike on every rank."""

from __future__ import annotations

import copy
import logging
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hf import Engine, initialize
from ds_hf.config import load_config
from ds_hf.config.plan import nonfinite_mode
from ds_hf.engine.optim.outcome import Outcome
from ds_hf.errors import ConfigError, LossScaleError, NonFiniteError
from ds_hf.log import logger
from tests.helpers.distributed import run_distributed
from tests.helpers.parity import base_config, full_weights

NAN, INF = float("nan"), float("inf")


class OnlyBackward(torch.autograd.Function):
    """The identity, whose gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.factor, None


class Model(nn.Module):
    """``first``, ``blocks.0``, ``blocks.1``, ``last``; ``bad`` multiplies the gradient that ``blocks.0`` gets."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.last = nn.Linear(3, 1)

    def forward(self, x: Tensor, bad: float = 1.0, factor: float = 1.0) -> Tensor:
        x = self.first(x).detach() * self.first.weight.mean()
        x = OnlyBackward.apply(self.blocks[0](x.detach()), bad)  # type: ignore[no-untyped-call]
        return self.last(torch.tanh(self.blocks[1](x))).square().mean() * factor


def make(stage: int, mode: str | None, **more: Any) -> Engine:
    torch.manual_seed(0)
    own = {} if mode is None else {"ds_hf": {"nonfinite": mode}}
    return initialize(model=Model(), config={**base_config(stage), **more, **own})[0]


def train(engine: Engine, *, bad: float = 1.0, factor: float = 1.0, rank: int = -1, micro: int = -1) -> None:
    """One step; ``rank`` multiplies gradient and loss of its micro-batch ``micro`` by those."""
    here = dist.get_rank() == rank % dist.get_world_size()
    steps = engine.gradient_accumulation_steps()
    for index in range(steps):
        hit = here and index == micro % steps
        x = torch.linspace(-1, 1, 12).view(4, 3) + dist.get_rank() + index
        engine.backward(engine(x, bad if hit else 1.0, factor if hit else 1.0))
        engine.step()


class Heard(logging.Handler):
    """Warnings of this rank, but for that about ``first``, which has no gradient."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "no gradient in this step" not in record.getMessage():
            self.texts.append(record.getMessage())

    def __enter__(self) -> Heard:
        logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logger.removeHandler(self)


SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"gradient_clipping": 1.0, "gradient_accumulation_steps": 2},
    {"bf16": {"enabled": True, "check_grad_overflow": False}},
    {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "gradient_clipping": 1.0},
    {"optimizer": {"type": "Lamb", "params": {"lr": 1e-2}}},
)


def all_settings() -> list[tuple[int, dict[str, Any]]]:
    return [*((stage, SETTINGS[1]) for stage in range(4)), *((2, more) for more in SETTINGS[2:]), (0, {})]


def warned() -> None:
    world = dist.get_world_size()
    for stage, more in all_settings():
        engine = make(stage, None, **more)
        with Heard() as heard:
            train(engine)
            train(engine, bad=NAN)
            train(engine)
        if dist.get_rank():
            assert heard.texts == []
        else:
            (text,) = heard.texts  # told once, though the third is bad too
            assert text.startswith("step 2: the norm of the gradients is nan.")
            assert "'blocks.0.weight'" in text
            assert ("rank" in text.split("blocks.0.weight")[1].split(":")[0]) == (world > 1)
            assert "The loss was finite" in text
            assert '"nonfinite": "skip"' in text
        assert engine.skipped_steps == 0
        weights = full_weights(engine.module)
        assert not weights["blocks.0.weight"].isfinite().any()
        engine.destroy()


@pytest.mark.parametrize("world", [1, 2])
def test_warned_of_once(world: int) -> None:
    run_distributed(warned, world, timeout=90)


def losses() -> None:
    engine = make(2, None, gradient_accumulation_steps=2)
    with Heard() as heard:
        train(engine, factor=INF, rank=1, micro=0)
    assert engine.get_global_grad_norm() == INF
    if dist.get_rank() == 0:
        assert "The loss was not finite on rank 1." in heard.texts[0]
    engine.destroy()
    for value, word in ((1e25, "inf"), (NAN, "nan")):  # squares overflow, while every gradient is finite
        engine = make(1, None)
        with Heard() as heard:
            engine.scale(engine(torch.ones(2, 3), 1.0, value)).backward()  # type: ignore[no-untyped-call]
            engine.step()
        if dist.get_rank() == 0:
            assert f"norm of the gradients is {word}" in heard.texts[0]
            assert ("first parameter" in heard.texts[0]) == (word == "nan")
        engine.destroy()


def test_says_whose_loss_it_was() -> None:
    run_distributed(losses, 2, timeout=60)


def under_a_loss_scale() -> None:
    """Overflows are the scale's business until it cannot fall, and where a loss is not finite."""
    fp16 = {"enabled": True, "initial_scale_power": 1, "hysteresis": 1, "min_loss_scale": 1}
    for stage in (0, 2):
        engine = make(stage, None, fp16=fp16)
        with Heard() as heard:
            train(engine, bad=NAN, rank=1)  # halves the scale
        assert not any("blocks.0" in text for text in heard.texts)
        with Heard() as heard, pytest.raises(LossScaleError) if stage else nullcontext():
            train(engine, bad=NAN, rank=1)
        named = torch.tensor(sum("whose gradient is not finite is 'blocks.0.weight'" in text for text in heard.texts))
        dist.all_reduce(named)
        assert named in ((1,) if stage == 0 else (1, 2))  # the ranks that have a part of it
        engine.destroy()
    engine = make(2, None, fp16={"enabled": True})
    with Heard() as heard:
        for _ in range(2):
            train(engine, factor=NAN, rank=1)
    told = [text for text in heard.texts if "The loss was not finite on rank 1." in text]
    assert len(told) == (dist.get_rank() == 1)
    assert engine.skipped_steps == 2
    engine.destroy()


def test_what_a_loss_scale_cannot_mend_is_named() -> None:
    run_distributed(under_a_loss_scale, 2, timeout=60)


def skipped() -> None:
    for stage, more in all_settings():
        if more.get("bf16"):
            more = {"bf16": {"enabled": True}}
        engine, twin = make(stage, "skip", **more), make(stage, None, **more)
        with Heard() as heard:
            train(engine)
            for bad in (NAN, INF):
                before = full_weights(engine.module)
                train(engine, bad=bad, micro=0)
                after = full_weights(engine.module)
                assert all(torch.equal(before[name], after[name]) for name in before)
                assert not engine.was_step_applied()
        assert (engine.global_steps, engine.skipped_steps) == (3, 2)
        named = [text for text in heard.texts if "first parameter" in text]
        assert len(named) == (dist.get_rank() == 0)
        assert all("The step is skipped" in text for text in named)
        lines = [f"step {1 + n} skipped: a gradient is inf or nan ({n} skipped so far)" for n in (1, 2)]
        assert [text for text in heard.texts if text not in named] == (lines if dist.get_rank() == 0 else [])
        train(engine)
        for _ in range(2):
            train(twin)
        mine, other = full_weights(engine.module), full_weights(twin.module)
        assert all(torch.equal(mine[name], other[name]) for name in mine), (stage, more)
        engine.destroy()
        twin.destroy()


@pytest.mark.parametrize("world", [1, 2])
def test_skipped_on_every_rank(world: int) -> None:
    run_distributed(skipped, world, timeout=90)


def raised() -> list[str]:
    texts = []
    for stage, more in all_settings():
        if more.get("bf16"):
            more = {"bf16": {"enabled": True}}
        engine, twin = make(stage, "error", **more), make(stage, None, **more)
        train(engine)
        before = full_weights(engine.module)
        with pytest.raises(NonFiniteError, match=r"step 2: .*'blocks\.0\.weight'") as caught:
            train(engine, bad=INF)
        texts.append(str(caught.value))
        after = full_weights(engine.module)
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert (engine.global_steps, engine.skipped_steps) == (1, 0)
        train(engine)  # goes on as if the bad micro-batches had not been
        for _ in range(2):
            train(twin)
        mine, other = full_weights(engine.module), full_weights(twin.module)
        assert all(torch.equal(mine[name], other[name]) for name in mine), (stage, more)
        engine.destroy()
        twin.destroy()
    return texts


@pytest.mark.parametrize("world", [1, 2])
def test_raises_the_same_on_every_rank(world: int) -> None:
    found = run_distributed(raised, world, timeout=90)
    assert all(texts == found[0] for texts in found)


def costs() -> None:
    """Collectives of a finite step, and numbers, whatever the mode."""
    for stage in range(4):
        counts, weights = [], []
        for mode in (None, "skip", "error"):
            engine = make(stage, mode)
            train(engine)
            before = engine.axis.log.count
            train(engine)
            counts.append(engine.axis.log.count - before)
            weights.append(full_weights(engine.module))
            engine.destroy()
        assert len(set(counts)) == 1
        assert all(torch.equal(weights[0][name], other[name]) for other in weights for name in other)


def test_costs_no_collective() -> None:
    run_distributed(costs, 2, timeout=60)


class Later(Outcome):
    """Of a device that is behind the host."""

    arrived = False

    @property
    def on_host(self) -> bool:
        return False

    @property
    def known(self) -> bool:
        return self.arrived


def known_later() -> None:
    """As on a GPU: the host learns of the norm after the update, and may not wait for it."""
    for mode, more in ((None, {}), (None, {"gradient_clipping": 1.0}), ("skip", {})):
        engine = make(2, mode, **more)
        assert engine.optimizer is not None
        engine.optimizer._outcome = later = Later()
        train(engine)
        with Heard() as heard:
            train(engine, bad=NAN, rank=0)
            assert not any("norm of the gradients" in text for text in heard.texts)
            later.arrived = True
            engine.settle_step()
        place = [text for text in heard.texts if "norm of the gradients" in text]
        assert all(text.startswith("step 2: the norm of the gradients is nan") for text in place)
        assert place or dist.get_rank()
        if mode is None:  # what the gradients became says it, on the rank that has it
            told: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(told, place)
            assert any("'blocks.0.weight'" in text for texts in told for text in texts)
        engine.destroy()


@pytest.mark.parametrize("world", [1, 2])
def test_where_the_host_learns_later(world: int) -> None:
    run_distributed(known_later, world, timeout=60)


def mode_of(**config: Any) -> str:
    return nonfinite_mode(load_config({"train_batch_size": 1, **config}, world_size=1))


def test_the_mode_follows_from_the_precision() -> None:
    assert mode_of() == "warn"
    assert mode_of(bf16={"enabled": True}) == "skip"
    assert mode_of(bf16={"enabled": True, "check_grad_overflow": False}) == "warn"
    assert mode_of(fp16={"enabled": True}) == "skip"
    assert mode_of(torch_autocast={"enabled": True, "dtype": "fp16"}) == "skip"
    assert mode_of(bf16={"enabled": True}, ds_hf={"nonfinite": "error"}) == "error"
    assert mode_of(bf16={"enabled": True}, ds_hf={"nonfinite": "warn"}) == "warn"
    assert mode_of(ds_hf={"nonfinite": None}) == "warn"


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"ds_hf": {"nonfinite": "ignore"}}, '"warn", "skip", "error"'),
        ({"ds_hf": {"nonfinite": True}}, '"warn", "skip", "error"'),
        ({"ds_hf": {"nonfinite": "warn"}, "fp16": {"enabled": True}}, "loss scale"),
        ({"ds_hf": {"nonfinite": "error"}, "torch_autocast": {"enabled": True, "dtype": "fp16"}}, "loss scale"),
        ({"ds_hf": {"nonfinite": "skip"}, "bf16": {"enabled": True, "check_grad_overflow": False}}, "contradicts"),
        ({"ds_hf": {"nonfinite": "warn"}, "bf16": {"enabled": True, "check_grad_overflow": True}}, "contradicts"),
    ],
)
def test_refused(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        load_config({"train_batch_size": 1, **copy.deepcopy(config)}, world_size=1)
    assert [fault.pointer for fault in caught.value.faults] == ["/ds_hf/nonfinite"]
