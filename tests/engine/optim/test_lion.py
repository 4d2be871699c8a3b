"""Lion against the paper's rule written out in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ds_hf.engine.optim.lion import DeepSpeedCPULion, FusedLion

LR, BETAS, DECAY = 1e-2, (0.9, 0.98), 0.1


def draw(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in ((5, 3), (4,), (0,))]


def expected(steps: int) -> list[torch.Tensor]:
    values = [value.double() for value in draw(0)]
    momenta = [torch.zeros_like(value) for value in values]
    for step in range(steps):
        for i, grad in enumerate(draw(100 + step)):
            g = grad.double()
            direction = torch.sign(BETAS[0] * momenta[i] + (1 - BETAS[0]) * g)
            values[i] = values[i] * (1 - LR * DECAY) - LR * direction
            momenta[i] = BETAS[1] * momenta[i] + (1 - BETAS[1]) * g
    return values


@pytest.mark.parametrize("cls", [FusedLion, DeepSpeedCPULion])
def test_equals_the_rule(cls: Callable[..., Any]) -> None:
    params = [torch.nn.Parameter(value) for value in draw(0)]
    optimizer = cls(params, lr=LR, betas=BETAS, weight_decay=DECAY)
    for step in range(10):
        for param, grad in zip(params, draw(100 + step), strict=True):
            param.grad = grad
        optimizer.step()
    for param, value in zip(params, expected(10), strict=True):
        torch.testing.assert_close(param.detach().double(), value, rtol=1e-5, atol=1e-6)
    assert {float(state["step"]) for state in optimizer.state.values()} == {10.0}
    assert all(set(state) == {"step", "exp_avg"} for state in optimizer.state.values())


def test_update_of_parts_equals_step_of_the_whole() -> None:
    params = [torch.nn.Parameter(value) for value in draw(0)]
    optimizer = DeepSpeedCPULion(params, lr=LR, betas=BETAS, weight_decay=DECAY)
    for step in range(10):
        grads = draw(100 + step)
        for i in reversed(range(3)):
            optimizer.update(optimizer.param_groups[0], params[i : i + 1], grads[i : i + 1])
    for param, value in zip(params, expected(10), strict=True):
        torch.testing.assert_close(param.detach().double(), value, rtol=1e-5, atol=1e-6)


def test_half_precision_params_keep_fp32_momentum() -> None:
    param = torch.nn.Parameter(draw(0)[0].bfloat16())
    optimizer = DeepSpeedCPULion([param], lr=0.5)
    param.grad = torch.ones_like(param)
    before = param.detach().clone()
    optimizer.step()
    assert optimizer.state[param]["exp_avg"].dtype == torch.float32
    torch.testing.assert_close(param.detach(), before - 0.5, rtol=1e-2, atol=1e-2)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="betas"):
        FusedLion([torch.nn.Parameter(torch.ones(1))], betas=(1.0, 0.9))
    with pytest.raises(ValueError, match="lr"):
        FusedLion([torch.nn.Parameter(torch.ones(1))], lr=-1)
