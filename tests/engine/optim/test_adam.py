"""FusedAdam and DeepSpeedCPUAdam against torch.optim, step for step, and their shared state format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_hf.engine.optim.adam import DeepSpeedCPUAdam, FusedAdam

SHAPES = [(7, 5), (13,), (), (0,), (3, 2, 2)]


def make_params(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def make_grads(step: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def run(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter], steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        for param, grad in zip(params, make_grads(step, params[0].dtype), strict=True):
            param.grad = grad
        optimizer.step()


def largest_difference(left: list[torch.nn.Parameter], right: list[torch.nn.Parameter]) -> float:
    return max(float((a - b).detach().abs().max()) for a, b in zip(left, right, strict=True) if a.numel())


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_equals_torch(adam_w_mode: bool, weight_decay: float) -> None:
    options: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": weight_decay}
    reference = make_params()
    torch_class = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    run(torch_class(reference, **options), reference, 20)
    for build in (
        lambda params: FusedAdam(params, adam_w_mode=adam_w_mode, **options),
        lambda params: DeepSpeedCPUAdam(params, adamw_mode=adam_w_mode, **options),
    ):
        params = make_params()
        run(build(params), params, 20)
        assert largest_difference(params, reference) < 1e-6
        assert largest_difference(params, make_params()) > 1e-2


def test_decoupled_decay_is_the_default() -> None:
    results = []
    for options in ({}, {"adam_w_mode": True}, {"adam_w_mode": False}):
        params = make_params()
        run(FusedAdam(params, lr=1e-2, weight_decay=0.5, **options), params, 3)
        results.append(params)
    assert largest_difference(results[0], results[1]) == 0.0
    assert largest_difference(results[0], results[2]) > 1e-3


@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_without_bias_correction(adam_w_mode: bool) -> None:
    lr, beta1, beta2, eps, decay = 1e-2, 0.9, 0.99, 1e-8, 0.1
    params = make_params()
    optimizer = FusedAdam(
        params,
        lr=lr,
        betas=(beta1, beta2),
        eps=eps,
        weight_decay=decay,
        bias_correction=False,
        adam_w_mode=adam_w_mode,
    )
    expected = [param.detach().double() for param in make_params()]
    means = [torch.zeros_like(value) for value in expected]
    squares = [torch.zeros_like(value) for value in expected]
    for step in range(5):
        for i, grad in enumerate(make_grads(step)):
            g = grad.double()
            if adam_w_mode:
                expected[i] *= 1 - lr * decay
            else:
                g = g + decay * expected[i]
            means[i] = beta1 * means[i] + (1 - beta1) * g
            squares[i] = beta2 * squares[i] + (1 - beta2) * g * g
            expected[i] -= lr * means[i] / (squares[i].sqrt() + eps)
    run(optimizer, params, 5)
    for param, value in zip(params, expected, strict=True):
        torch.testing.assert_close(param.detach().double(), value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cls", [FusedAdam, DeepSpeedCPUAdam])
def test_update_steps_only_the_given_params_with_the_given_gradients(cls: Callable[..., Any]) -> None:
    params, reference = make_params(), make_params()
    optimizer, whole = cls(params, lr=1e-2, weight_decay=0.1), cls(reference, lr=1e-2, weight_decay=0.1)
    run(whole, reference, 3)
    for step in range(3):
        grads = make_grads(step)
        for param in params:
            param.grad = torch.full_like(param, 1e9)  # must be ignored
        optimizer.update(optimizer.param_groups[0], params[:2], grads[:2])
        assert params[4] not in optimizer.state or step > 0
        optimizer.update(optimizer.param_groups[0], params[2:], grads[2:])
    assert largest_difference(params, reference) == 0.0
    optimizer.update(optimizer.param_groups[0], [], [])
    assert {float(state["step"]) for state in optimizer.state.values()} == {3.0}


def test_state_is_that_of_torch() -> None:
    params, reference = make_params(), make_params()
    ours, theirs = FusedAdam(params, lr=1e-2), torch.optim.AdamW(reference, lr=1e-2, fused=True)
    run(ours, params, 2)
    run(theirs, reference, 2)
    for param, other in zip(params, reference, strict=True):
        left, right = ours.state[param], theirs.state[other]
        assert set(left) == set(right) == {"step", "exp_avg", "exp_avg_sq"}
        for key in left:
            assert left[key].dtype == right[key].dtype
            assert left[key].shape == right[key].shape
            torch.testing.assert_close(left[key], right[key])


def test_checkpoints_move_between_torch_and_us() -> None:
    """Three steps with one, save, three more with the other: as six with one."""
    uninterrupted = make_params()
    run(torch.optim.AdamW(uninterrupted, lr=1e-2, weight_decay=0.1), uninterrupted, 6)

    def build(name: str, params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        cls: Any = torch.optim.AdamW if name == "torch" else FusedAdam
        return cls(params, lr=1e-2, weight_decay=0.1)

    for first, second in (("torch", "ours"), ("ours", "torch"), ("ours", "ours")):
        params = make_params()
        before = build(first, params)
        run(before, params, 3)
        after = build(second, params)
        after.load_state_dict(before.state_dict())
        run(after, params, 3, first=3)
        assert largest_difference(params, uninterrupted) < 1e-6, (first, second)


def test_integer_step_of_an_older_checkpoint_is_taken() -> None:
    params, reference = make_params(), make_params()
    ours, theirs = FusedAdam(params), FusedAdam(reference)
    run(ours, params, 2)
    run(theirs, reference, 2)
    for state in ours.state.values():
        state["step"] = int(state["step"])
    run(ours, params, 1, first=2)
    run(theirs, reference, 1, first=2)
    assert largest_difference(params, reference) == 0.0


def test_param_groups_have_their_own_options() -> None:
    params, reference = make_params(), make_params()

    def groups(p: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
        return [{"params": p[:2], "lr": 0.1, "weight_decay": 0.0}, {"params": p[2:], "betas": (0.5, 0.6)}]

    run(FusedAdam(groups(params), lr=1e-3, weight_decay=0.1), params, 5)
    run(torch.optim.AdamW(groups(reference), lr=1e-3, weight_decay=0.1), reference, 5)
    assert largest_difference(params, reference) < 1e-6


def test_half_precision_params_with_fp32_states() -> None:
    params, reference = make_params(torch.bfloat16), make_params(torch.bfloat16)
    optimizer = DeepSpeedCPUAdam(params, lr=1e-2)
    run(optimizer, params, 3)
    assert all(state["exp_avg"].dtype == torch.float32 for state in optimizer.state.values())
    run(torch.optim.AdamW(reference, lr=1e-2, weight_decay=0.0), reference, 3)
    assert largest_difference(params, reference) < 0.05
    assert largest_difference(params, make_params(torch.bfloat16)) > 0.01
    narrow = DeepSpeedCPUAdam(make_params(torch.bfloat16), fp32_optimizer_states=False)
    run(narrow, narrow.param_groups[0]["params"], 1)
    assert all(state["exp_avg_sq"].dtype == torch.bfloat16 for state in narrow.state.values())


def test_params_of_two_dtypes_in_one_group() -> None:
    params = [*make_params(), *make_params(torch.float64)]
    optimizer = FusedAdam(params, lr=1e-2)
    for param, grad in zip(params, [*make_grads(0), *make_grads(0, torch.float64)], strict=True):
        param.grad = grad
    optimizer.step()
    count = len(SHAPES)
    for narrow, wide in zip(params[:count], params[count:], strict=True):
        torch.testing.assert_close(narrow.double(), wide, rtol=1e-6, atol=1e-6)


def test_closure_and_zero_grad() -> None:
    param = torch.nn.Parameter(torch.tensor([2.0]))
    optimizer = FusedAdam([param], lr=0.1)

    def closure() -> float:
        optimizer.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 4.0
    assert param.item() == pytest.approx(1.9, abs=1e-6)
    optimizer.zero_grad()
    assert param.grad is None


@pytest.mark.parametrize("cls", [FusedAdam, DeepSpeedCPUAdam])
def test_refusals(cls: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="amsgrad"):
        cls(make_params(), amsgrad=True)
    with pytest.raises(ValueError, match="maximize"):
        cls([{"params": make_params(), "maximize": True}])
    with pytest.raises(ValueError, match="betas"):
        cls(make_params(), betas=(0.9, 1.0))
    with pytest.raises(ValueError, match="lr"):
        cls(make_params(), lr=-1.0)
