"""Optimizers and schedules of the user's own: with modes that move the weights between steps (schedule-free), with
lists of their own, closures and metrics."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ds_hf import initialize
from ds_hf.engine.zero.access import safe_get_full_fp32_param
from ds_hf.errors import ConfigError, DsHfError
from ds_hf.log import forget_said, logger
from tests.helpers.distributed import run_distributed
from tests.helpers.logs import Lines
from tests.helpers.parity import base_config, full_weights

BETA = 0.9


class ScheduleFree(torch.optim.Optimizer):
    """SGD of Defazio et al. 2024 (arXiv:2405.15682), with the modes of its authors' package."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "train_mode": True})

    @torch.no_grad()
    def eval(self) -> None:
        self._move(False, 1 - 1 / BETA)

    @torch.no_grad()
    def train(self) -> None:
        self._move(True, 1 - BETA)

    def _move(self, train: bool, weight: float) -> None:
        for group in self.param_groups:
            for param in group["params"] if group["train_mode"] != train else ():
                if "z" in self.state[param]:
                    param.lerp_(self.state[param]["z"], weight)
            group["train_mode"] = train

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            rate = 1 / (group["k"] + 1)
            for param in group["params"]:
                state = self.state[param]
                z = state.setdefault("z", param.clone())
                param.lerp_(z, rate).add_(param.grad, alpha=group["lr"] * (BETA * (1 - rate) - 1))
                z.sub_(param.grad, alpha=group["lr"])
            group["k"] += 1


def layers() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


def batch(index: int, rank: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * index + rank))


def differences(stage: int, offload: bool, own: bool, folder: str) -> list[float]:
    """How far weights are from plain torch's in the modes; ``own``: the user's object is told, and not the engine's."""
    plain, world = layers(), dist.get_world_size()
    reference = ScheduleFree(plain.parameters(), 0.5)

    def made() -> Any:
        model = layers()
        inner = ScheduleFree(model.parameters(), 0.5)
        config = base_config(stage, optimizer=None, zero_allow_untested_optimizer=True)
        if offload:
            config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
            config["zero_force_ds_cpu_optimizer"] = False
        engine, optimizer, *_ = initialize(model=model, optimizer=inner, config=config)
        return engine, inner if own else optimizer

    engine, optimizer = made()
    found = []

    def compare() -> None:
        weights = full_weights(engine.module)
        found.append(max(float((weights[n] - p.detach()).abs().max()) for n, p in plain.named_parameters()))

    for index, mode in enumerate(("train", "train", "eval", "train", "resume", "train")):
        if mode == "resume":  # what was saved in eval mode goes on in train mode
            optimizer.eval()
            engine.save_checkpoint(folder)
            engine.destroy()
            engine, optimizer = made()
            engine.load_checkpoint(folder)
        else:
            for each in (optimizer, reference):
                getattr(each, mode)()
            compare()
        if mode == "train":
            reference.zero_grad()
            engine.backward(engine(batch(index, dist.get_rank())).square().mean())
            engine.step()
            for rank in range(world):
                (plain(batch(index, rank)).square().mean() / world).backward()
            reference.step()
            compare()
    engine.destroy()
    return found


def in_16_bits(stage: int) -> float:
    """How far the model's weights in eval mode are from the fp32 ones that the optimizer has, rounded."""
    model = layers()
    inner = ScheduleFree(model.parameters(), 0.5)
    config = base_config(stage, optimizer=None, zero_allow_untested_optimizer=True, bf16={"enabled": True})
    engine, optimizer, *_ = initialize(model=model, optimizer=inner, config=config)
    for index in range(3):
        engine.backward(engine(batch(index, dist.get_rank()).bfloat16()).square().mean())
        engine.step()
    before = full_weights(model)
    optimizer.eval()
    after = full_weights(model)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    masters = {name: safe_get_full_fp32_param(param) for name, param in model.named_parameters()}
    return max(float((after[name] - masters[name].bfloat16()).abs().max()) for name in after)  # type: ignore[union-attr]


def everywhere(folder: str) -> None:
    for stage, offload, own in ((0, False, False), (1, False, True), (2, True, False), (3, False, True)):
        found = differences(stage, offload, own, f"{folder}/{stage}")
        assert max(found) < 1e-6, (stage, found)
    for stage in (0, 2):
        assert in_16_bits(stage) == 0.0


@pytest.mark.parametrize("world", [1, 2])
def test_weights_of_the_modes(world: int, tmp_path: Any) -> None:
    run_distributed(everywhere, world, str(tmp_path), timeout=60)


class OwnList(torch.optim.Optimizer):
    """Its step goes through a list that it has kept."""

    def __init__(self, params: Any) -> None:
        self.listed = {"all": list(params)}
        super().__init__(self.listed["all"], {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.listed["all"]:
            if param.grad is not None:
                param.sub_(param.grad, alpha=0.1)


def test_what_goes_through_a_list_of_its_own_is_told() -> None:
    """It does not train: at no stage are the gradients where it looks for them."""
    forget_said()
    logger.addHandler(lines := Lines(logging.WARNING))
    config = base_config(0, optimizer=None, zero_allow_untested_optimizer=True)
    for inner, says in ((OwnList, 1), (ScheduleFree, 0)):
        model = layers()
        optimizer = inner(model.parameters()) if inner is OwnList else ScheduleFree(model.parameters(), 0.5)
        initialize(model=model, optimizer=optimizer, config=config)[0].destroy()
        told = [text for text in lines.texts if "keeps parameters beside its param_groups (in listed)" in text]
        assert len(told) == says
        lines.texts.clear()
    logger.removeHandler(lines)


def test_steps_of_the_object_that_was_given_are_told() -> None:
    """They find no gradients, which add up until the engine makes a step."""
    forget_said()
    logger.addHandler(lines := Lines(logging.WARNING))
    for stepped in (True, False):
        model = layers()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        engine, *_ = initialize(model=model, optimizer=inner, config=base_config(0, optimizer=None))
        before = copy.deepcopy(dict(model.named_parameters()))
        for index in range(65):
            engine.backward(engine(batch(index, 0)).square().mean())
            (engine if stepped else inner).step()
        assert all(torch.equal(before[name], p) for name, p in model.named_parameters()) is not stepped
        assert sum("64 backwards, and no step yet" in text for text in lines.texts) == (not stepped)
        engine.destroy()
    logger.removeHandler(lines)


def test_what_needs_a_closure_is_refused() -> None:
    model = layers()
    config = base_config(0, optimizer=None, zero_allow_untested_optimizer=True)
    with pytest.raises(ConfigError, match=r"LBFGS.step\(\) computes losses again by a closure"):
        initialize(model=model, optimizer=torch.optim.LBFGS(model.parameters()), config=config)


def test_a_schedule_that_needs_a_metric() -> None:
    """It is given with the step, also within an accumulation; without it the sentence says how."""
    model = layers()
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(inner, factor=0.5, patience=0)
    config = base_config(0, optimizer=None, gradient_accumulation_steps=2)
    engine, *_ = initialize(model=model, optimizer=inner, config=config, lr_scheduler=schedule)
    rates = []
    for index, metric in enumerate((1.0, 1.0, 2.0, 0.5)):
        for micro in range(2):
            engine.backward(engine(batch(2 * index + micro, 0)).square().mean())
            engine.step(lr_kwargs={"metrics": metric})
        rates.append(inner.param_groups[0]["lr"])
    assert rates == [1.0, 0.5, 0.25, 0.25]
    for _ in range(2):
        engine.backward(engine(batch(0, 0)).square().mean())
        if engine.is_gradient_accumulation_boundary():
            with pytest.raises(
                DsHfError, match=r"ReduceLROnPlateau needs a metric at each step: engine.step\(lr_kwargs="
            ):
                engine.step()
        else:
            engine.step()


class ByRow(torch.optim.Optimizer):
    """Steps of another length for each row, whose lengths its constructor makes: of a bias' shape, not of a matrix'."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["row"] = 1 + torch.arange(len(param)) / 10

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                lengths = self.state[param]["row"].view(-1, *[1] * (param.dim() - 1))
                param.sub_(param.grad * lengths, alpha=group["lr"])
                self.state[param]["row"] *= 0.9


def test_a_state_that_has_the_shape_of_some_parameters(tmp_path: Any) -> None:
    """Also saved and resumed, where each parameter is updated as a whole."""
    plain = layers()
    reference = ByRow(plain.parameters())
    config = base_config(0, optimizer=None, zero_allow_untested_optimizer=True)

    def made() -> Any:
        model = layers()
        return initialize(model=model, optimizer=ByRow(model.parameters()), config=config)[0]

    engine = made()
    for index in range(4):
        if index == 2:
            engine.save_checkpoint(str(tmp_path))
            engine.destroy()
            engine = made()
            engine.load_checkpoint(str(tmp_path))
        reference.zero_grad()
        engine.backward(engine(batch(index, 0)).square().mean())
        engine.step()
        plain(batch(index, 0)).square().mean().backward()
        reference.step()
    for mine, theirs in zip(engine.module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-7)
