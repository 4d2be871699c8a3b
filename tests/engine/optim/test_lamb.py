"""LAMB against its rule written out in float64: You et al. 2020, with DeepSpeed's numerics.

They differ from the paper in two things: the ratio has bounds, and the bias correction scales the step instead of the
moments, so that eps and the weight decay are not corrected.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_hf import initialize
from ds_hf.engine.optim.base import Piece, UnitPieces
from ds_hf.engine.optim.lamb import FusedLamb
from ds_hf.engine.zero.layout import FlatLayout
from tests.helpers.distributed import run_distributed

SHAPES = ((5, 3), (4,), (2, 3, 2), (1,), (33, 7))
BASE: dict[str, Any] = {
    "lr": 2e-2,
    "betas": (0.9, 0.99),
    "eps": 1e-6,
    "weight_decay": 0.1,
    "bias_correction": True,
    "max_coeff": 10.0,
    "min_coeff": 0.01,
}


def draw(seed: int, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) * scale for shape in SHAPES]


class Rule:
    """One parameter in float64."""

    def __init__(self, value: Tensor, inside: bool = False, **options: Any) -> None:
        self.p, self.inside = value.detach().double().clone(), inside
        self.m, self.v, self.t = torch.zeros_like(self.p), torch.zeros_like(self.p), 0
        self.options = {**BASE, **options}
        self.ratio = float("nan")

    def step(self, gradient: Tensor) -> None:
        o, g = self.options, gradient.double()
        beta1, beta2 = o["betas"]
        self.t += 1
        self.m = self.m * beta1 + g * (1 - beta1)
        self.v = self.v * beta2 + g**2 * (1 - beta2)
        root = torch.sqrt(self.v + o["eps"]) if self.inside else torch.sqrt(self.v) + o["eps"]
        update = self.m / root + o["weight_decay"] * self.p
        weight, size = math.sqrt(float((self.p**2).sum())), math.sqrt(float((update**2).sum()))
        self.ratio = 1.0
        if weight > 0 and size > 0:
            self.ratio = min(max(weight / size, o["min_coeff"]), o["max_coeff"])
        rate = o["lr"]
        if o["bias_correction"]:
            rate *= math.sqrt(1 - beta2**self.t) / (1 - beta1**self.t)
        self.p = self.p - rate * self.ratio * update


def assert_equal(params: list[nn.Parameter], rules: list[Rule], rtol: float = 1e-5, atol: float = 1e-6) -> None:
    for param, rule in zip(params, rules, strict=True):
        torch.testing.assert_close(param.detach().double(), rule.p, rtol=rtol, atol=atol)


def run(
    optimizer: FusedLamb, params: list[nn.Parameter], rules: list[Rule], steps: int = 10, scale: float = 1.0
) -> None:
    for step in range(steps):
        for param, rule, grad in zip(params, rules, draw(100 + step, scale), strict=True):
            param.grad = grad
            rule.step(grad)
        optimizer.step()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.0},
        {"bias_correction": False},
        {"eps": 1e-2},
        {"eps": 1e-2, "inside": True},
        {"betas": (0.0, 0.5)},
        {"lr": 0.0},
    ],
    ids=str,
)
def test_equals_the_rule(options: dict[str, Any]) -> None:
    params = [nn.Parameter(value) for value in draw(0)]
    rules = [Rule(param, **options) for param in params]
    own = {key: value for key, value in options.items() if key != "inside"}
    optimizer = FusedLamb(params, **{**BASE, **own}, eps_inside_sqrt=options.get("inside", False))
    run(optimizer, params, rules)
    assert_equal(params, rules)
    assert {float(state["step"]) for state in optimizer.state.values()} == {10.0}
    assert all(set(state) == {"step", "exp_avg", "exp_avg_sq"} for state in optimizer.state.values())


def test_where_the_eps_is_matters() -> None:
    """The case above would pass for either place if the tolerance were too wide."""
    outside, inside = Rule(draw(0)[0], eps=1e-2), Rule(draw(0)[0], eps=1e-2, inside=True)
    for rule in (outside, inside):
        rule.step(draw(100)[0])
    assert float((outside.p - inside.p).abs().max()) > 1e-4


@pytest.mark.parametrize(
    ("size", "bounds", "expected"),
    [(1e3, (0.01, 10.0), 10.0), (1e-4, (0.01, 10.0), 0.01), (1e3, (0.5, 0.5), 0.5), (1.0, (0.01, 10.0), None)],
)
def test_bounds_of_the_trust_ratio(size: float, bounds: tuple[float, float], expected: float | None) -> None:
    params = [nn.Parameter(value * size) for value in draw(0)]
    options = {"min_coeff": bounds[0], "max_coeff": bounds[1], "weight_decay": 0.0}
    rules = [Rule(param, **options) for param in params]
    optimizer = FusedLamb(params, **{**BASE, **options})
    run(optimizer, params, rules, steps=2)
    assert_equal(params, rules, rtol=1e-5, atol=1e-8)
    for rule in rules:
        assert (rule.ratio == expected) if expected else (bounds[0] < rule.ratio < bounds[1])


def test_ratio_is_one_where_a_norm_is_zero() -> None:
    zeros = nn.Parameter(torch.zeros(4))  # no weights: Adam's step, the rate itself
    still = nn.Parameter(torch.ones(4))  # no update: nothing moves, and nothing is 0 / 0
    optimizer = FusedLamb([zeros, still], lr=0.5, weight_decay=0.0, eps=1e-12, betas=(0.9, 0.99))
    zeros.grad, still.grad = torch.full((4,), 3.0), torch.zeros(4)
    optimizer.step()
    torch.testing.assert_close(zeros.detach(), torch.full((4,), -0.5), rtol=1e-5, atol=0)
    assert torch.equal(still.detach(), torch.ones(4))


def test_groups_have_their_own_numbers() -> None:
    params = [nn.Parameter(value) for value in draw(0)]
    other = {"lr": 0.1, "weight_decay": 0.0, "betas": (0.5, 0.9), "bias_correction": False, "max_coeff": 0.3}
    optimizer = FusedLamb([{"params": params[:2]}, {"params": params[2:], **other}], **BASE)
    rules = [Rule(param) for param in params[:2]] + [Rule(param, **other) for param in params[2:]]
    run(optimizer, params, rules)
    assert_equal(params, rules)


def test_schedulers_change_the_rate() -> None:
    param = nn.Parameter(draw(0)[0])
    rule = Rule(param)
    optimizer = FusedLamb([param], **BASE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    for step in range(4):
        rule.options["lr"] = BASE["lr"] / (step + 1)
        param.grad = draw(100 + step)[0]
        rule.step(param.grad)
        optimizer.step()
        schedule.step()
    assert_equal([param], [rule])


def test_max_grad_norm_clips_each_group() -> None:
    params = [nn.Parameter(value) for value in draw(0)]
    optimizer = FusedLamb([{"params": params[:2]}, {"params": params[2:]}], **BASE, max_grad_norm=1.5)
    rules = [Rule(param) for param in params]
    for step in range(5):
        scale = 0.01 if step == 3 else 1.0  # below the limit: nothing is clipped
        grads = draw(100 + step, scale)
        for part in (slice(0, 2), slice(2, None)):
            norm = math.sqrt(sum(float((grad.double() ** 2).sum()) for grad in grads[part]))
            assert (norm < 1.5) == (step == 3)
            for rule, grad in zip(rules[part], grads[part], strict=True):
                rule.step(grad * min(1.0, 1.5 / norm))
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        optimizer.step()
        assert all(torch.equal(p.grad, g) for p, g in zip(params, grads, strict=True))  # type: ignore[arg-type]
    assert_equal(params, rules)


def test_control_scales_and_forbids() -> None:
    params = [nn.Parameter(value) for value in draw(0)]
    rules = [Rule(param) for param in params]
    optimizer = FusedLamb(params, **BASE)
    group = optimizer.param_groups[0]
    for step in range(4):
        grads = draw(100 + step)
        before = copy.deepcopy([optimizer.state[p] for p in params]), [p.detach().clone() for p in params]
        optimizer.update(group, params, [g * float("nan") for g in grads], scale_and_skip=torch.tensor([0.25, 1.0]))
        if step:
            assert str(before) == str(([optimizer.state[p] for p in params], [p.detach() for p in params]))
        optimizer.update(group, params, [grad * 4 for grad in grads], scale_and_skip=torch.tensor([0.25, 0.0]))
        for rule, grad in zip(rules, grads, strict=True):
            rule.step(grad)
    assert_equal(params, rules)
    assert {float(state["step"]) for state in optimizer.state.values()} == {4.0}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_gradients_in_and_parameters_out(dtype: torch.dtype) -> None:
    params = [nn.Parameter(value) for value in draw(0)]
    rules = [Rule(param) for param in params]
    optimizer = FusedLamb(params, **BASE)
    outs = [torch.zeros(shape, dtype=dtype) for shape in SHAPES]
    for step in range(5):
        grads = [grad.to(dtype) for grad in draw(100 + step)]
        optimizer.update(optimizer.param_groups[0], params, grads, outs)
        for rule, grad in zip(rules, grads, strict=True):
            rule.step(grad)
    assert_equal(params, rules)
    assert all(torch.equal(out, param.detach().to(dtype)) for out, param in zip(outs, params, strict=True))


def test_half_precision_params_keep_fp32_moments() -> None:
    param = nn.Parameter(draw(0)[0].bfloat16())
    optimizer = FusedLamb([param], lr=0.5)
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert optimizer.state[param]["exp_avg"].dtype == optimizer.state[param]["exp_avg_sq"].dtype == torch.float32


def test_pieces_of_one_process_are_whole_parameters() -> None:
    """What an engine calls where the states are replicated."""
    layout = FlatLayout([torch.Size(shape) for shape in SHAPES], 1)
    flat = torch.zeros(layout.numel)
    for slot, value in zip(layout.slots, draw(0), strict=True):
        flat[slot.offset : slot.end] = value.flatten()
    params = [nn.Parameter(flat[slot.offset : slot.end]) for slot in layout.slots]
    optimizer = FusedLamb(params, **BASE)
    rules = [Rule(value) for value in draw(0)]
    group, cpu = optimizer.param_groups[0], torch.device("cpu")
    for step in range(5):
        grads = draw(100 + step)
        pieces = [
            Piece(group, param, grad.flatten(), None, slot.shape, 0, slot.index, slot.offset, slot.offset)
            for param, grad, slot in zip(params, grads, layout.slots, strict=True)
        ]
        unit = UnitPieces(pieces, len(SHAPES), layout, [group] * len(SHAPES), torch.float32, None, cpu, cpu)
        optimizer.update_pieces([unit], None)
        for rule, grad in zip(rules, grads, strict=True):
            rule.step(grad)
    for param, rule in zip(params, rules, strict=True):
        torch.testing.assert_close(param.detach().double(), rule.p.flatten(), rtol=1e-5, atol=1e-6)


def test_trust_ratios_of_the_last_step_can_be_asked_for() -> None:
    params = [nn.Parameter(value) for value in draw(0)]
    optimizer = FusedLamb(params, **BASE)
    rules = [Rule(value) for value in draw(0)]
    assert optimizer.get_lamb_coeffs() == []
    for step in range(3):
        for param, rule, grad in zip(params, rules, draw(100 + step), strict=True):
            param.grad = grad
            rule.step(grad)
        optimizer.step()
        assert optimizer.get_lamb_coeffs() == pytest.approx([rule.ratio for rule in rules], rel=1e-5)


def _ratios_by_rank(stage: int) -> list[float]:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Lamb", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = initialize(model=nn.Linear(6, 5), config=config)
    engine.backward(engine(torch.ones(2, 6)).square().mean())
    engine.step()
    assert engine.optimizer is not None
    return engine.optimizer.optimizer.get_lamb_coeffs()  # type: ignore[operator,union-attr,no-any-return]


def test_ratios_are_those_of_whole_parameters_where_ranks_hold_pieces() -> None:
    whole = run_distributed(_ratios_by_rank, 2, 0, timeout=60)
    assert len(whole[0]) == 2
    assert whole[0] == whole[1]
    pieces = run_distributed(_ratios_by_rank, 2, 1, timeout=60)
    assert pieces[0][0] == pytest.approx(whole[0][0], rel=1e-5)  # the matrix, of which rank 0 holds the beginning
    assert pieces[1][-1] == pytest.approx(whole[0][1], rel=1e-5)  # the bias lies at the end


def test_what_has_no_gradient_stays() -> None:
    first, second = (nn.Parameter(value) for value in draw(0)[:2])
    optimizer = FusedLamb([first, second], **BASE)
    before = second.detach().clone()
    first.grad = torch.ones_like(first)
    optimizer.step()
    assert torch.equal(second.detach(), before)
    assert second not in optimizer.state


def test_state_dict_goes_on() -> None:
    params = [nn.Parameter(value) for value in draw(0)]
    rules = [Rule(param) for param in params]
    optimizer = FusedLamb(params, **BASE)
    run(optimizer, params, rules, steps=3)
    saved = copy.deepcopy(optimizer.state_dict())
    copies = [nn.Parameter(param.detach().clone()) for param in params]
    loaded = FusedLamb(copies, lr=9.0)
    loaded.load_state_dict(saved)
    run(loaded, copies, rules, steps=4)
    assert_equal(copies, rules)
    assert {float(state["step"]) for state in loaded.state.values()} == {7.0}


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"lr": -1.0}, "lr"),
        ({"eps": float("nan")}, "eps"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"max_grad_norm": -1.0}, "max_grad_norm"),
        ({"betas": (1.0, 0.9)}, "betas"),
        ({"betas": (0.9, -0.1)}, "betas"),
        ({"min_coeff": 0.0}, "min_coeff"),
        ({"min_coeff": 2.0, "max_coeff": 1.0}, "max_coeff"),
        ({"amsgrad": True}, "amsgrad"),
    ],
)
def test_refusals(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        FusedLamb([nn.Parameter(torch.ones(1))], **options)


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(4, 3, sparse=True)
    optimizer = FusedLamb(table.parameters())
    table(torch.tensor([1, 1])).sum().backward()
    with pytest.raises(ValueError, match="sparse=False"):
        optimizer.step()


class Mixed(torch.nn.Module):
    """Layers of two dtypes, whose masters and gradients differ in dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).bfloat16()).float().square().mean()


def test_dtypes_of_one_engine_may_differ() -> None:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "Lamb", "params": {"lr": 0.01}},
    }
    engine, *_ = initialize(model=Mixed(), config=config)
    before = [p.detach().clone() for p in engine.module.parameters()]
    engine.backward(engine(torch.ones(4, 8)))
    engine.step()
    assert all(not torch.equal(p, q) for p, q in zip(engine.module.parameters(), before, strict=True))
    engine.destroy()
