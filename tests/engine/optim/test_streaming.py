"""Stepping unit by unit equals stepping whole, and only where that is known to be right."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ds_hf.engine.optim.adagrad import DeepSpeedCPUAdagrad
from ds_hf.engine.optim.adam import DeepSpeedCPUAdam, FusedAdam
from ds_hf.engine.optim.lion import FusedLion
from ds_hf.engine.optim.streaming import is_elementwise, streamed_update


def draw(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in ((5, 3), (4,), (6,), (0,))]


def make_params() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(value) for value in draw(0)]


def groups(params: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:], "lr": 0.1}]


BUILDERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda p: torch.optim.AdamW(p, lr=1e-2),
    lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    lambda p: torch.optim.Adam(p, lr=1e-2, betas=(0.5, 0.6), eps=1e-4),
    lambda p: torch.optim.Adagrad(p, lr=1e-2, lr_decay=0.1, initial_accumulator_value=0.2),
    lambda p: torch.optim.Adagrad(p, lr=1e-2, fused=True),
    lambda p: torch.optim.SGD(p, lr=1e-2),
    lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, dampening=0.1, weight_decay=0.1),
    lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    lambda p: FusedAdam(p, lr=1e-2),
    lambda p: DeepSpeedCPUAdam(p, lr=1e-2, adamw_mode=False),
    lambda p: FusedLion(p, lr=1e-2),
    lambda p: DeepSpeedCPUAdagrad(p, lr=1e-2),
]


@pytest.mark.parametrize("build", BUILDERS)
def test_streamed_steps_equal_whole_steps(build: Callable[[Any], torch.optim.Optimizer]) -> None:
    params, reference = make_params(), make_params()
    streamed, whole = build(groups(params)), build(groups(reference))
    update = streamed_update(streamed)
    assert update is not None
    for step in range(6):
        grads = draw(100 + step)
        if step == 3:  # a rate that a schedule writes counts at once
            streamed.param_groups[0]["lr"] = whole.param_groups[0]["lr"] = 0.05
        for param, grad in zip(reference, grads, strict=True):
            param.grad = grad
        whole.step()
        first, second = streamed.param_groups
        update(second, params[3:], grads[3:])
        update(second, params[2:3], grads[2:3])
        update(first, params[:2], grads[:2])
        update(first, [], [])
    assert all(param.grad is None for param in params)
    for param, other in zip(params, reference, strict=True):
        torch.testing.assert_close(param, other, rtol=3e-7, atol=1e-7)
        assert streamed.state[param].keys() == whole.state[other].keys()
        for key, value in streamed.state[param].items():
            assert value.dtype == whole.state[other][key].dtype
            torch.testing.assert_close(value, whole.state[other][key])


def test_streamed_state_saves_and_loads_as_torchs_own() -> None:
    params = make_params()
    first = torch.optim.AdamW(params, lr=1e-2)
    update = streamed_update(first)
    assert update is not None
    update(first.param_groups[0], params, draw(1))
    second = torch.optim.AdamW(params, lr=1e-2)
    second.load_state_dict(first.state_dict())
    update = streamed_update(second)
    assert update is not None
    update(second.param_groups[0], params, draw(2))
    reference = make_params()
    whole = torch.optim.AdamW(reference, lr=1e-2)
    for seed in (1, 2):
        for param, grad in zip(reference, draw(seed), strict=True):
            param.grad = grad
        whole.step()
    for param, other in zip(params, reference, strict=True):
        torch.testing.assert_close(param, other, rtol=3e-7, atol=1e-7)


def test_torch_adagrad_over_params_that_its_constructor_did_not_see() -> None:
    """The engine puts shards in the place of the params, and torch makes the state of those in the constructor."""
    params, reference = make_params(), make_params()
    whole = torch.optim.Adagrad(reference, lr=0.1, initial_accumulator_value=0.3)
    streamed = torch.optim.Adagrad(make_params(), lr=0.1, initial_accumulator_value=0.3)
    streamed.state.clear()
    streamed.param_groups[0]["params"] = params
    update = streamed_update(streamed)
    assert update is not None
    for seed in (1, 2, 3):
        for param, grad in zip(reference, draw(seed), strict=True):
            param.grad = grad
        whole.step()
        update(streamed.param_groups[0], params, draw(seed))
    for param, other in zip(params, reference, strict=True):
        torch.testing.assert_close(param, other, rtol=3e-7, atol=1e-7)


class OwnAdamW(torch.optim.AdamW):
    """A user's subclass, which may do anything in step()."""


@pytest.mark.parametrize(
    "build",
    [
        lambda p: torch.optim.AdamW(p, amsgrad=True),
        lambda p: torch.optim.Adam(p, maximize=True),
        lambda p: torch.optim.Adam(p, differentiable=True),
        lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1)),
        lambda p: torch.optim.Adagrad(p, maximize=True),
        lambda p: torch.optim.SGD(p, lr=0.1, maximize=True),
        lambda p: torch.optim.Adafactor(p),
        lambda p: OwnAdamW(p),
    ],
)
def test_everything_else_steps_whole(build: Callable[[Any], torch.optim.Optimizer]) -> None:
    assert streamed_update(build(make_params())) is None


@pytest.mark.parametrize("cls", [FusedAdam, torch.optim.AdamW])
def test_hooked_or_replaced_steps_are_not_bypassed(cls: Any) -> None:
    hooked = cls(make_params())
    hooked.register_step_post_hook(lambda *_: None)
    assert streamed_update(hooked) is None
    replaced = cls(make_params())
    replaced.step = lambda: None
    assert streamed_update(replaced) is None


@pytest.mark.parametrize("cls", [FusedAdam, torch.optim.AdamW])
def test_torch_schedulers_neither_prevent_streaming_nor_complain(cls: Any) -> None:
    params = make_params()
    optimizer = cls(params, lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    update = streamed_update(optimizer)
    assert update is not None
    update(optimizer.param_groups[0], params, draw(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_is_elementwise() -> None:
    params = [torch.nn.Parameter(torch.ones(2, 2))]
    for name in ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adagrad", "Adadelta", "ASGD"):
        assert is_elementwise(getattr(torch.optim, name)(params, lr=0.1)), name
    for own in (FusedAdam, DeepSpeedCPUAdam, FusedLion, DeepSpeedCPUAdagrad):
        assert is_elementwise(own(params))
    for name in ("Adafactor", "Muon", "LBFGS"):
        assert not is_elementwise(getattr(torch.optim, name)(params)), name
    assert not is_elementwise(OwnAdamW(params))


@pytest.mark.parametrize(
    "name", ["SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adagrad", "Adadelta", "ASGD"]
)
def test_elementwise_means_that_cutting_does_not_matter(name: str) -> None:
    """A tensor cut in two flat pieces is updated as the whole tensor."""
    whole = torch.nn.Parameter(draw(0)[0].clone())
    pieces = [torch.nn.Parameter(piece.clone()) for piece in draw(0)[0].flatten().split([7, 8])]
    cls = getattr(torch.optim, name)
    options = {"momentum": 0.9} if name == "SGD" else {}
    optimizers = [cls([whole], lr=0.01, **options), cls(pieces, lr=0.01, **options)]
    for step in range(4):
        grad = draw(100 + step)[0]
        whole.grad = grad.clone()
        for piece, part in zip(pieces, grad.flatten().split([7, 8]), strict=True):
            piece.grad = part.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(torch.cat(list(pieces)), whole.flatten(), rtol=3e-7, atol=1e-7)
