"""Muon against its rule by singular value decomposition in float64 and against torch's own; AdamW beside it."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.muon.original_muon import adam_update, muon_update
from torch import Tensor, nn

from ds_hf.engine.optim.muon import Muon, MuonWithAuxAdam
from ds_hf.engine.optim.muon_groups import mark_matrices, muon_of_json
from tests.engine.optim.test_newton_schulz import by_singular_values

MATRICES = ((6, 6), (4, 11), (11, 4), (1, 5))
BASE: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1, "momentum": 0.9}
ADAM: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-8, "weight_decay": 0.2}
CPU = torch.device("cpu")


def draw(seed: int, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes or MATRICES]


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(value) for value in draw(0, *shapes, dtype=dtype)]


class Rule:
    """One matrix in float64; the polynomial is applied to its singular values."""

    def __init__(self, value: Tensor, **options: Any) -> None:
        self.p, self.options = value.detach().double().clone(), {**BASE, **options}
        self.m = torch.zeros_like(self.p)

    def step(self, gradient: Tensor) -> None:
        o, g = self.options, gradient.double()
        self.m = o["momentum"] * self.m + (1 - o["momentum"]) * g
        update = by_singular_values((1 - o["momentum"]) * g + o["momentum"] * self.m)
        rows, columns = self.p.shape[-2:]
        self.p = (1 - o["lr"] * o["weight_decay"]) * self.p - o["lr"] * math.sqrt(max(1, rows / columns)) * update


def run(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], rules: list[Rule], steps: int = 5) -> None:
    shapes = [tuple(param.shape) for param in params]
    for step in range(steps):
        for param, rule, grad in zip(params, rules, draw(100 + step, *shapes), strict=True):
            param.grad = grad.to(param.dtype)
            rule.step(param.grad)
        optimizer.step()


def assert_equal(params: list[nn.Parameter], rules: list[Rule], atol: float = 1e-5) -> None:
    for param, rule in zip(params, rules, strict=True):
        torch.testing.assert_close(param.detach().double(), rule.p, rtol=0, atol=atol)


# -- the rule ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["gram", "standard"])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-11), (torch.float32, 1e-5)])
def test_equals_the_rule(method: str, dtype: torch.dtype, atol: float) -> None:
    params = parameters(dtype=dtype)
    rules = [Rule(param) for param in params]
    optimizer = Muon(params, **BASE, ns_method=method)
    run(optimizer, params, rules)
    assert_equal(params, rules, atol)
    for param, rule in zip(params, rules, strict=True):
        assert set(optimizer.state[param]) == {"momentum_buffer"}
        torch.testing.assert_close(optimizer.state[param]["momentum_buffer"].double(), rule.m, rtol=1e-5, atol=1e-6)


def test_equals_torch() -> None:
    """torch iterates in bf16 also on the CPU: its updates are a few per cent off, along the same direction."""
    mine, theirs = parameters(), parameters()
    ours, torchs = Muon(mine, **BASE, ns_method="standard"), torch.optim.Muon(theirs, **BASE)
    before = [param.detach().clone() for param in mine]
    for step in range(3):
        for param, other, grad in zip(mine, theirs, draw(100 + step), strict=True):
            param.grad, other.grad = grad, grad.clone()
        ours.step()
        torchs.step()
    for param, other, start in zip(mine, theirs, before, strict=True):
        moved, off = (other - start).detach().norm(), (param - other).detach().norm()
        assert float(off) < 0.03 * float(moved)
        momenta = ours.state[param]["momentum_buffer"], torchs.state[other]["momentum_buffer"]
        torch.testing.assert_close(*momenta, rtol=1e-6, atol=1e-7)


def test_the_update_is_orthogonal() -> None:
    """Rows of length 1 that are orthogonal to 30 %: singular values of 0.68 to 1.21, times the shape's factor."""
    params = parameters((8, 20), (20, 8))
    before = [param.detach().clone() for param in params]
    optimizer = Muon(params, lr=1.0, weight_decay=0.0)
    for param, grad in zip(params, draw(7, (8, 20), (20, 8)), strict=True):
        param.grad = grad
    optimizer.step()
    for param, start, factor in zip(params, before, (1.0, math.sqrt(20 / 8)), strict=True):
        values = torch.linalg.svdvals(start - param.detach()) / factor
        assert float(values.min()) > 0.67
        assert float(values.max()) < 1.22


def test_batches_of_matrices_and_convolutions() -> None:
    """Three dims are a batch; four are one matrix, whose factor goes by the kernel (DeepSpeed's and Jordan's way)."""
    batch, kernel, tall = parameters((3, 7, 4), (5, 2, 3, 3), (5, 2, 4, 1))
    optimizer = Muon([batch, kernel, tall], **BASE)
    grads = draw(9, (3, 7, 4), (5, 2, 3, 3), (5, 2, 4, 1))
    rules = [Rule(matrix) for matrix in batch]
    flat = {kernel: Rule(kernel.reshape(5, 18)), tall: Rule(tall.reshape(5, 8))}
    for rule, grad in zip(rules, grads[0], strict=True):
        rule.step(grad)
    starts = {param: param.detach().reshape(5, -1).double() for param in flat}
    for param, grad in zip(flat, grads[1:], strict=True):
        flat[param].step(grad.reshape(5, -1))
    for param, grad in zip((batch, kernel, tall), grads, strict=True):
        param.grad = grad
    optimizer.step()
    torch.testing.assert_close(batch.detach().double(), torch.stack([rule.p for rule in rules]), rtol=0, atol=1e-5)
    torch.testing.assert_close(kernel.detach().reshape(5, 18).double(), flat[kernel].p, rtol=0, atol=1e-5)
    decay = 1 - BASE["lr"] * BASE["weight_decay"]
    expected = decay * starts[tall] + 2 * (flat[tall].p - decay * starts[tall])  # sqrt(4 / 1)
    torch.testing.assert_close(tall.detach().reshape(5, 8).double(), expected, rtol=0, atol=1e-5)


def test_zero_gradients_and_zero_elements() -> None:
    params = parameters((3, 4), (0, 4))
    before = params[0].detach().clone()
    optimizer = Muon(params, **{**BASE, "weight_decay": 0.0})
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    assert torch.equal(params[0].detach(), before)


def test_what_has_no_gradient_stays() -> None:
    first, second = parameters((3, 4), (3, 4))
    before = second.detach().clone()
    optimizer = Muon([first, second], **BASE)
    first.grad = torch.ones_like(first)
    optimizer.step()
    assert torch.equal(second.detach(), before)
    assert second not in optimizer.state


# -- beside it, Adam -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decoupled", [True, False])
def test_the_rest_is_adam(decoupled: bool) -> None:
    matrices, rest, twins = parameters(), parameters((9, 4), (5,), ()), parameters((9, 4), (5,), ())
    groups = [{"params": matrices, "use_muon": True, **BASE}, {"params": rest, "use_muon": False, **ADAM}]
    optimizer = MuonWithAuxAdam(groups, adam_w_mode=decoupled)
    theirs = (torch.optim.AdamW if decoupled else torch.optim.Adam)(twins, **ADAM)
    rules = [Rule(param) for param in matrices]
    for step in range(4):
        for param, other, grad in zip(rest, twins, draw(50 + step, (9, 4), (5,), ()), strict=True):
            param.grad, other.grad = grad, grad.clone()
        theirs.step()
        for param, rule, grad in zip(matrices, rules, draw(100 + step), strict=True):
            param.grad = grad
            rule.step(grad)
        optimizer.step()
    assert_equal(matrices, rules)
    for param, other in zip(rest, twins, strict=True):
        torch.testing.assert_close(param.detach(), other.detach(), rtol=1e-5, atol=1e-6)
        assert set(optimizer.state[param]) == {"step", "exp_avg", "exp_avg_sq"}
        assert float(optimizer.state[param]["step"]) == 4.0


def test_defaults_are_deepspeeds() -> None:
    first, second = parameters((2, 3), (3,))
    groups = [{"params": first, "use_muon": True}, {"params": [second], "use_muon": False, "betas": [0.5, 0.6]}]
    optimizer = MuonWithAuxAdam(groups)
    muon, adam = ({k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups)
    assert muon == {"use_muon": True, "lr": 0.02, "momentum": 0.95, "weight_decay": 0.0, "ns_method": "gram"}
    assert adam == {"use_muon": False, "lr": 3e-4, "betas": (0.5, 0.6), "eps": 1e-10, "weight_decay": 0.0}
    assert MuonWithAuxAdam([{"params": second, "use_muon": False}]).param_groups[0]["betas"] == (0.9, 0.95)


def test_what_deepspeed_passes_for_adam_is_taken() -> None:
    groups = [{"params": parameters((3,)), "use_muon": False}]
    assert MuonWithAuxAdam(groups, torch.optim.AdamW, {"foreach": True}, True, True).adam_w_mode
    assert not MuonWithAuxAdam(groups, torch.optim.AdamW, {"adam_w_mode": False}).adam_w_mode
    assert not MuonWithAuxAdam(groups, None, {"adamw_mode": False}).adam_w_mode


# -- as part of an engine ------------------------------------------------------------------------------------------


def both_kinds() -> tuple[MuonWithAuxAdam, list[nn.Parameter]]:
    params = parameters((4, 6), (5,))
    groups = [{"params": [params[0]], "use_muon": True, **BASE}, {"params": [params[1]], "use_muon": False, **ADAM}]
    return MuonWithAuxAdam(groups), params


def test_control_scales_and_forbids() -> None:
    (mine, params), (plain, others) = both_kinds(), both_kinds()
    for step in range(3):
        grads = draw(100 + step, (4, 6), (5,))
        for index in range(2):
            before = str([mine.state[params[index]], params[index]])
            forbid, scale = torch.tensor([0.25, 1.0]), torch.tensor([0.25, 0.0])
            nans = [torch.full_like(grads[index], float("nan"))]
            out = [torch.zeros_like(params[index], dtype=torch.bfloat16)]
            mine.update(mine.param_groups[index], [params[index]], nans, out, scale_and_skip=forbid)
            assert step == 0 or before == str([mine.state[params[index]], params[index]])
            assert not out[0].any()
            mine.update(mine.param_groups[index], [params[index]], [grads[index] * 4], scale_and_skip=scale)
            plain.update(plain.param_groups[index], [others[index]], [grads[index]])
    for param, other in zip(params, others, strict=True):
        torch.testing.assert_close(param, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_gradients_in_and_parameters_out(dtype: torch.dtype) -> None:
    params = parameters()
    rules = [Rule(param) for param in params]
    optimizer = Muon(params, **BASE)
    outs = [torch.zeros(shape, dtype=dtype) for shape in MATRICES]
    for step in range(3):
        grads = [grad.to(dtype) for grad in draw(100 + step)]
        optimizer.update(optimizer.param_groups[0], params, grads, outs)
        for rule, grad in zip(rules, grads, strict=True):
            rule.step(grad)
    assert_equal(params, rules)
    assert all(torch.equal(out, param.detach().to(dtype)) for out, param in zip(outs, params, strict=True))


def test_half_precision_params_keep_fp32_momentum() -> None:
    param = nn.Parameter(draw(0)[0].bfloat16())
    optimizer = Muon([param])
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert optimizer.state[param]["momentum_buffer"].dtype == torch.float32
    assert param.dtype == torch.bfloat16


def test_state_dict_goes_on() -> None:
    optimizer, params = both_kinds()
    once, whole = both_kinds()
    for step in range(6):
        for other, grad in zip(whole, draw(100 + step, (4, 6), (5,)), strict=True):
            other.grad = grad
        once.step()
    for step in range(6):
        if step == 3:
            saved = copy.deepcopy(optimizer.state_dict())
            params = [nn.Parameter(param.detach().clone()) for param in params]
            groups = [{"params": [params[0]], "use_muon": True}, {"params": [params[1]], "use_muon": False}]
            optimizer = MuonWithAuxAdam(groups)
            optimizer.load_state_dict(saved)
        for param, grad in zip(params, draw(100 + step, (4, 6), (5,)), strict=True):
            param.grad = grad
        optimizer.step()
    assert all(torch.equal(param, other) for param, other in zip(params, whole, strict=True))


def test_takes_the_state_of_torchs_muon() -> None:
    theirs, mine = parameters(), parameters()
    old, new = torch.optim.Muon(theirs, **BASE), Muon(mine)
    rules = [Rule(param) for param in mine]
    for step in range(2):
        for param, rule, grad in zip(theirs, rules, draw(300 + step), strict=True):
            param.grad = grad
            rule.m = BASE["momentum"] * rule.m + (1 - BASE["momentum"]) * grad.double()
        old.step()
    new.load_state_dict(old.state_dict())
    assert new.param_groups[0]["use_muon"]
    run(new, mine, rules)
    assert_equal(mine, rules)


# -- from JSON -----------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(5, 4)
        self.wte = nn.Embedding(5, 4)
        self.proj = nn.Linear(4, 4)
        self.conv = nn.Conv1d(4, 4, 3)
        self.norm = nn.LayerNorm(4)
        self.LM_Head = nn.Linear(4, 5, bias=False)
        self.classifier = nn.Linear(4, 2)
        self.gain = nn.Parameter(torch.ones(()))


def test_which_parameters_are_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr("ds_hf.engine.optim.muon_groups.warn_once", told.append)
    model = Mixed()
    model.classifier.weight.use_muon = False  # type: ignore[assignment]
    mark_matrices(model)
    marked = {name for name, param in model.named_parameters() if param.use_muon}  # type: ignore[attr-defined]
    assert marked == {"wte.weight", "proj.weight", "conv.weight"}
    assert len(told) == 1
    assert "wte.weight is the weight of an embedding" in told[0]


def test_groups_of_json() -> None:
    model = Mixed()
    mark_matrices(model)
    optimizer = muon_of_json(model.parameters(), lr=0.5, muon_lr=0.1, weight_decay=0.3, betas=(0.7, 0.8), momentum=0.6)
    muon, adam = optimizer.param_groups
    assert (muon["name"], muon["lr"], muon["momentum"], muon["weight_decay"]) == ("muon-params", 0.1, 0.6, 0.3)
    assert (adam["name"], adam["lr"], adam["betas"], adam["eps"]) == ("adam-params", 0.5, (0.7, 0.8), 1e-10)
    assert "betas" not in muon
    assert "momentum" not in adam
    assert {id(p) for p in muon["params"]} == {
        id(m.weight) for m in (model.wte, model.proj, model.conv, model.classifier)
    }
    assert len(muon["params"]) + len(adam["params"]) == len(list(model.parameters()))


def test_given_groups_keep_their_settings() -> None:
    a, b, c, frozen = parameters((2, 3), (3,), (4, 4), (4, 4))
    frozen.requires_grad = False
    groups = [{"params": [a, b], "weight_decay": 0.0, "name": "plain"}, {"params": [c, frozen], "lr": 0.7, "eps": 1.0}]
    optimizer = muon_of_json(groups, lr=0.5, adam_lr=0.2, weight_decay=0.3, adam_w_mode=False)
    assert not optimizer.adam_w_mode
    found = [(g["name"], g["lr"], g["weight_decay"], len(g["params"])) for g in optimizer.param_groups]
    assert found == [("plain-muon-params", 0.5, 0.0, 1), ("plain-adam-params", 0.2, 0.0, 1),
                     ("group1-muon-params", 0.7, 0.3, 2)]  # fmt: skip
    assert "eps" not in optimizer.param_groups[2]
    assert [g["lr"] for g in muon_of_json([a, b]).param_groups] == [0.02, 3e-4]


# -- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "word"),
    [
        ({}, "use_muon"),
        ({"use_muon": True, "lr": -1.0}, "lr"),
        ({"use_muon": True, "momentum": 1.0}, "momentum"),
        ({"use_muon": True, "ns_method": "fast"}, "gram, standard"),
        ({"use_muon": False, "betas": (1.0, 0.5)}, "betas"),
        ({"use_muon": False, "eps": -1e-8}, "eps"),
        ({"use_muon": False, "amsgrad": True}, "amsgrad"),
    ],
)
def test_refusals(group: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        MuonWithAuxAdam([{"params": parameters((2, 2)), **group}])


def test_vectors_are_refused() -> None:
    optimizer = Muon(parameters((2, 2)))
    with pytest.raises(ValueError, match=r"shape \(3,\).*use_muon.: False"):
        optimizer.add_param_group({"params": parameters((3,)), "use_muon": True})
    assert len(optimizer.param_groups) == 1


# -- functions -----------------------------------------------------------------------------------------------------


def test_update_as_a_function() -> None:
    (value, grad) = draw(0, (4, 6), (4, 6), dtype=torch.float64)
    rule = Rule(value, lr=1.0, weight_decay=0.0, momentum=0.95)
    rule.step(grad)
    kept, momentum = grad.clone(), torch.zeros_like(grad)
    for method in ("gram", "standard"):
        momentum.zero_()
        torch.testing.assert_close(value - muon_update(grad, momentum, ns_method=method), rule.p, rtol=0, atol=1e-11)
        torch.testing.assert_close(momentum, rule.m)
    assert torch.equal(grad, kept)
    plain = muon_update(grad, torch.zeros_like(grad), nesterov=False)
    torch.testing.assert_close(plain, by_singular_values(grad), rtol=0, atol=1e-5)


def test_heads_and_experts_as_a_function() -> None:
    (grad,) = draw(0, (6, 5), dtype=torch.float64)
    found = muon_update(grad, torch.zeros_like(grad), num_heads=3)
    torch.testing.assert_close(found, by_singular_values(grad.view(3, 2, 5)).view(6, 5), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="not divisible by num_heads=4"):
        muon_update(grad, torch.zeros_like(grad), num_heads=4)
    (batch,) = draw(0, (2, 2, 4, 3), dtype=torch.float64)
    experts = muon_update(batch, torch.zeros_like(batch), is_expert_group=True)
    torch.testing.assert_close(experts, by_singular_values(batch) * math.sqrt(4 / 3), rtol=0, atol=1e-5)


def test_infinite_gradients_leave_the_momentum_alone() -> None:
    grad, momentum = torch.ones(2, 2), torch.full((2, 2), 0.5)
    grad[0, 0] = float("inf")
    assert not muon_update(grad, momentum, nesterov=False).isfinite().all()
    assert torch.equal(momentum, torch.full((2, 2), 0.5))


def test_adam_as_a_function() -> None:
    mine, theirs = parameters((4,)), parameters((4,))
    optimizer = torch.optim.Adam(theirs, lr=0.1, betas=(0.8, 0.9), eps=1e-6)
    first, second = torch.zeros(4), torch.zeros(4)
    for step in range(1, 4):
        (grad,) = draw(step, (4,))
        theirs[0].grad = grad
        optimizer.step()
        with torch.no_grad():
            mine[0] -= 0.1 * adam_update(grad, first, second, step, (0.8, 0.9), 1e-6)
    torch.testing.assert_close(mine[0], theirs[0])
