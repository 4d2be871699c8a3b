"""Few bits between processes over the life of a run: adapters on a frozen base, leaf modules, resumed runs.

Wires are compared with the same run without them; ``test_wire.py`` has the numbers, ``test_onebit.py`` the 1-bit rules.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hf import initialize
from ds_hf.engine.zero.gather import GatheredParameters
from ds_hf.engine.zero.leaf import set_z3_leaf_modules
from tests.contract.test_parity import VOCAB, model
from tests.helpers.distributed import run_distributed
from tests.helpers.models import Block
from tests.helpers.tensor import build

GLOBAL, LENGTH, STEPS = 4, 12, 6
EIGHT: dict[str, Any] = {"gradients": 8, "parameters": 8}
LOCO: dict[str, Any] = {"zero_quantized_gradients": True, "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024}}
Way = tuple[int, dict[str, Any], dict[str, Any]]  # stage, keys of zero, others
PLAIN: Way = (3, {}, {})


def config(way: Way) -> dict[str, Any]:
    stage, zero, more = way
    adam = {"type": "AdamW", "params": {"lr": 1e-3}}
    return {
        "train_batch_size": GLOBAL,
        "gradient_accumulation_steps": 1,
        "optimizer": adam,
        "zero_optimization": {"stage": stage, **zero},
        **more,
    }


def wire(stage: int, zero: dict[str, Any] | None = None, **keys: Any) -> Way:
    if stage < 3:
        keys.pop("parameters", None)
    return stage, zero or {}, {"ds_hf": {"wire": keys}}


def whole(name: str, **params: Any) -> Way:
    """At stage 0, with a second moment that comes to rest within a few steps."""
    return 0, {}, {"optimizer": {"type": name, "params": {"lr": 1e-3, "betas": [0.9, 0.9], **params}}}


ADAM, ONE_BIT = whole("Adam", bias_correction=False), whole("OneBitAdam", freeze_step=3)


def samples(step: int) -> Tensor:
    """This process's part of the global batch of ``step``, which is the same for every number of processes."""
    tokens = torch.randint(0, VOCAB, (GLOBAL, LENGTH), generator=torch.Generator().manual_seed(step))
    return tokens.chunk(dist.get_world_size())[dist.get_rank()]


def steps(engine: Any, first: int, last: int) -> list[float]:
    """Mean losses over processes."""
    losses = []
    for step in range(first, last):
        loss = engine(samples(step))
        loss = loss if isinstance(loss, Tensor) else loss.loss
        engine.backward(loss)
        engine.step()
        total = loss.detach().float().clone()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


def weights(trained: nn.Module) -> dict[str, Tensor]:
    with GatheredParameters(list(trained.parameters())):
        return {name: param.detach().clone() for name, param in trained.named_parameters()}


def train_each(kind: str, ways: list[Way]) -> list[tuple[list[float], dict[str, Tensor]]]:
    found = []
    for way in ways:
        trained = {"adapters": with_adapters, "experts": with_experts}[kind]()
        engine, *_ = initialize(model=trained, config=config(way))
        found.append((steps(engine, 0, STEPS), weights(trained)))
        engine.destroy()
    return found


def check(found: list[tuple[list[float], dict[str, Tensor]]]) -> None:
    """The first is without wires; the last two are full and 1-bit Adam."""
    (plain, _), *wires, (adam, _), (packed, _) = found
    for losses, full in [*((losses, plain) for losses, _ in wires), (packed, adam)]:
        assert losses == pytest.approx(full, rel=0.02)
        assert losses != full


# -- a frozen base with adapters ---------------------------------------------------------------------------------------


class WithLoss(nn.Module):
    """A causal language model that is its own loss."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.inner(input_ids=tokens, labels=tokens).loss
        return loss


def with_adapters() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    adapter = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], modules_to_save=["v_proj"])
    return WithLoss(get_peft_model(build("llama"), adapter))


@pytest.mark.slow
def test_adapters_learn_and_the_frozen_base_stays() -> None:
    ways = [PLAIN, wire(1, **EIGHT), wire(2, gradients=4), wire(3, **EIGHT), (2, LOCO, {}), ADAM, ONE_BIT]
    frozen = {name: param.detach() for name, param in with_adapters().named_parameters() if not param.requires_grad}
    assert frozen
    for found in run_distributed(train_each, 2, "adapters", ways, timeout=180):
        check(found)
        for _, after in found:
            assert all(torch.equal(after[name], value) for name, value in frozen.items())


# -- leaf modules ------------------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Two experts, of which each token goes to one; with few tokens one may have none on a process."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 2)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        share = self.router(x).softmax(-1)
        chosen = share.argmax(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            mask = chosen == index
            if mask.any():
                out[mask] = expert(x[mask]) * share[..., index][mask][:, None]
        return x + out


def with_experts() -> nn.Module:
    trained = model()
    for block in trained.blocks:
        assert isinstance(block, Block)
        block.down = nn.Sequential(block.down, Experts(block.down.out_features))  # type: ignore[assignment]
    set_z3_leaf_modules(trained, [Experts])
    return trained


@pytest.mark.slow
def test_leaf_modules() -> None:
    ways = [PLAIN, wire(2, gradients=8), wire(3, **EIGHT), wire(3, LOCO, parameters=8), ADAM, ONE_BIT]
    for world in (2, 4):
        for found in run_distributed(train_each, world, "experts", ways, timeout=180):
            check(found)


# -- resumed runs ------------------------------------------------------------------------------------------------------


def save(way: Way, folder: str) -> tuple[list[float], dict[str, Tensor]]:
    trained = model()
    engine, *_ = initialize(model=trained, config=config(way))
    steps(engine, 0, 3)
    engine.save_checkpoint(folder, tag="three")
    losses = steps(engine, 3, STEPS)
    found = weights(trained)
    engine.destroy()
    return losses, found


def resume(way: Way, folder: str) -> tuple[list[float], dict[str, Tensor], list[str]]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ds_hf").addHandler(handler)
    trained = model()
    engine, *_ = initialize(model=trained, config=config(way))
    steps(engine, 7, 8)  # what that leaves behind must not be seen any more
    engine.load_checkpoint(folder, tag="three")
    losses = steps(engine, 3, STEPS)
    found = weights(trained)
    engine.destroy()
    return losses, found, [text for text in said if "rounding of gradients" in text]


@pytest.mark.parametrize(
    ("world", "way"),
    [
        (2, (2, LOCO, {})),
        *(
            pytest.param(world, way, marks=pytest.mark.slow)
            for world, way in (
                (4, wire(2, LOCO, first_hop=2)),
                (2, wire(3, LOCO, parameters=8)),
                (2, wire(3, **EIGHT)),
                (2, (1, {**LOCO, "zeropp_loco_param": {"reset_T": 4}}, {"bf16": {"enabled": True}})),
            )
        ),
    ],
)
def test_a_resumed_run_is_the_saved_one_to_the_bit(world: int, way: Way, tmp_path: Path) -> None:
    saved = run_distributed(save, world, way, str(tmp_path), timeout=90)
    resumed = run_distributed(resume, world, way, str(tmp_path), timeout=90)
    for (losses, found), (again, other, said) in zip(saved, resumed, strict=True):
        assert again == losses
        assert all(torch.equal(other[name], value) for name, value in found.items())
        assert said == []


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 4])
@pytest.mark.parametrize("way", [wire(2, gradients=8), wire(3, **EIGHT), (2, LOCO, {})], ids=["2", "3", "LoCo"])
def test_another_world_goes_on(world: int, way: Way, tmp_path: Path) -> None:
    saved = run_distributed(save, 2, way, str(tmp_path), timeout=90)
    resumed = run_distributed(resume, world, way, str(tmp_path), timeout=90)
    for rank, (again, _, said) in enumerate(resumed):
        assert again == pytest.approx(saved[0][0], rel=0.02)
        assert len(said) == (1 if way[1] and world > 1 and rank == 0 else 0)


@pytest.mark.slow
def test_a_checkpoint_without_feedback_begins_with_nothing(tmp_path: Path) -> None:
    saved = run_distributed(save, 2, wire(2, gradients=4), str(tmp_path), timeout=90)
    for rank, (again, _, said) in enumerate(run_distributed(resume, 2, (2, LOCO, {}), str(tmp_path), timeout=90)):
        assert again == pytest.approx(saved[0][0], rel=0.02)
        assert len(said) == (1 if rank == 0 else 0)
