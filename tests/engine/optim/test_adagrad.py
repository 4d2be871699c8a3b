"""Adagrad against torch.optim.Adagrad."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from ds_hf.engine.optim.adagrad import DeepSpeedCPUAdagrad, FusedAdagrad


def draw(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in ((5, 3), (4,), (0,))]


def train(
    optimizer_class: Any, steps: int = 10, **options: Any
) -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
    params = [torch.nn.Parameter(value) for value in draw(0)]
    optimizer = optimizer_class(params, **options)
    for step in range(steps):
        for param, grad in zip(params, draw(100 + step), strict=True):
            param.grad = grad
        optimizer.step()
    return params, optimizer


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": 0.1, "weight_decay": 0.1, "eps": 1e-6},
        {"lr": 0.1, "lr_decay": 0.01},
        {"lr": 0.1, "initial_accumulator_value": 0.5},
    ],
)
def test_equals_torch(options: dict[str, Any]) -> None:
    reference, theirs = train(torch.optim.Adagrad, **options)
    classes: list[Any] = [FusedAdagrad]
    if not options.keys() & {"lr_decay", "initial_accumulator_value"}:
        classes.append(DeepSpeedCPUAdagrad)
    for cls in classes:
        params, ours = train(cls, **options)
        for param, other in zip(params, reference, strict=True):
            torch.testing.assert_close(param, other, rtol=3e-7, atol=1e-7)
            assert set(ours.state[param]) == set(theirs.state[other]) == {"step", "sum"}
            torch.testing.assert_close(ours.state[param]["sum"], theirs.state[other]["sum"])
            assert ours.state[param]["step"] == theirs.state[other]["step"] == 10.0


def test_continues_from_a_checkpoint_of_torch() -> None:
    reference, theirs = train(torch.optim.Adagrad, 5, lr=0.1)
    params = [torch.nn.Parameter(param.detach().clone()) for param in reference]
    ours = DeepSpeedCPUAdagrad(params, lr=0.9)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))  # torch would share the tensors
    grads = draw(7)
    ours.update(ours.param_groups[0], params, grads)
    for param, grad in zip(reference, grads, strict=True):
        param.grad = grad
    theirs.step()
    for param, other in zip(params, reference, strict=True):
        torch.testing.assert_close(param, other, rtol=3e-7, atol=1e-7)


def test_sparse_gradients_equal_torch() -> None:
    torch.manual_seed(0)
    ours, theirs = torch.nn.Embedding(6, 3, sparse=True), torch.nn.Embedding(6, 3, sparse=True)
    theirs.load_state_dict(ours.state_dict())
    optimizers = DeepSpeedCPUAdagrad(ours.parameters(), lr=0.1), torch.optim.Adagrad(theirs.parameters(), lr=0.1)
    for rows in ([0, 3, 3], [5], [3, 1]):
        for table, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            table(torch.tensor(rows)).square().sum().backward()
            assert table.weight.grad is not None
            assert table.weight.grad.is_sparse
            optimizer.step()
    torch.testing.assert_close(ours.weight, theirs.weight)
    optimizers[0].param_groups[0]["weight_decay"] = 0.1
    with pytest.raises(ValueError, match="sparse=False"):
        optimizers[0].step()


def test_refusals() -> None:
    with pytest.raises(ValueError, match="amsgrad"):
        DeepSpeedCPUAdagrad([torch.nn.Parameter(torch.ones(1))], amsgrad=True)
    with pytest.raises(ValueError, match="eps"):
        FusedAdagrad([torch.nn.Parameter(torch.ones(1))], eps=-1)
