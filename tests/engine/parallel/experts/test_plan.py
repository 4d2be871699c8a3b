"""Layers of experts that patterns of the file name, in models without a plan: what is cut, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hf.config import load_config
from ds_hf.config.types.root import MeshShape
from ds_hf.engine.comm.mesh import Mesh
from ds_hf.engine.parallel.experts.divide import divide_experts, told
from ds_hf.engine.parallel.experts.plan import plan_experts
from ds_hf.engine.zero.cut import cut_of
from ds_hf.errors import ConfigError
from tests.helpers.distributed import run_distributed
from tests.helpers.experts import build, section

EXPERTS, WIDTH, INNER = 4, 6, 10


class Experts(nn.Module):
    """Two stacked weights, a bias and a scale an expert, and a norm that all have in common."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH))
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER))
        self.bias = nn.Parameter(torch.randn(EXPERTS, INNER))
        self.scale = nn.Parameter(torch.randn(EXPERTS))
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            at, place = (indices == expert).nonzero(as_tuple=True)
            y = torch.tanh(self.norm(hidden[at]) @ self.up[expert].T + self.bias[expert]) @ self.down[expert].T
            out = out.index_add(0, at, y * self.scale[expert] * weights[at, place, None])
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), Experts()

    def forward(self, x: Tensor) -> Tensor:
        weights, indices = self.router(x).softmax(-1).topk(2)
        return x + self.experts(x, indices, weights)


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


PATTERN = {"moe_layer_pattern": r"blocks\.\d+"}


def keys(size: int = 2, **more: Any) -> Any:
    content = {"train_micro_batch_size_per_gpu": 1, "expert_parallel": section(size, **{**PATTERN, **more})}
    return load_config(content, world_size=size).expert_parallel


def gradients() -> float:
    alone, divided = Own().double(), Own().double()
    mesh = Mesh(MeshShape(data=2, expert=2))
    divide_experts(divided, mesh, keys())
    inputs = [torch.randn(7, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in (1, 2)]
    for each in inputs:
        alone(each).square().mean().backward()
    divided(inputs[dist.get_rank()]).square().mean().backward()
    far = 0.0
    for (name, param), other in zip(divided.named_parameters(), alone.parameters(), strict=True):
        cut = cut_of(param)
        assert (cut is not None) == (".experts." in name and ".norm." not in name)
        assert param.grad is not None
        assert other.grad is not None
        grad = param.grad.clone()
        dist.all_reduce(grad, group=mesh.world.group if cut is None else mesh.experts[1].group)
        far = max(far, float((grad - (other.grad if cut is None else cut.take(other.grad))).abs().max()))
    return far


def test_biases_and_scales_are_cut_and_what_all_have_is_not() -> None:
    assert max(run_distributed(gradients, 2, timeout=60)) < 1e-12


def test_what_was_found_is_said() -> None:
    (line,) = told(plan_experts(Own(), keys(), 2), 2)
    assert line.startswith("experts of 2 layers are divided over 2 processes, 2 of 4 on each: blocks.*.experts (")
    assert line.endswith("blocks.*.router, all outside of these blocks")
    assert "moe_layer_pattern" in line


def test_experts_that_are_weights_alone_are_refused() -> None:
    """As in DeepSpeed's own tests of AutoEP, whose blocks loop over the weights."""
    model = Own()
    held = nn.Module()
    held.up = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH))
    model.blocks[0].experts = held  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"blocks.0.experts, a Module, has no forward"):
        plan_experts(model, keys(), 2)


def test_experts_that_two_blocks_call_are_one_layer() -> None:
    model = Own()
    model.blocks[1].experts = model.blocks[0].experts
    assert [layer.name for layer in plan_experts(model, keys(), 2)] == ["blocks.0.experts"]


def child(experts: Any) -> None:
    experts.more = nn.Module()
    experts.more.weight = nn.Parameter(torch.ones(EXPERTS, 3, 3))


def child_buffer(experts: Any) -> None:
    experts.norm.register_buffer("scales", torch.ones(EXPERTS))


def second(experts: Any) -> None:
    experts.other = nn.Parameter(torch.ones(3, EXPERTS, 3))


def second_buffer(experts: Any) -> None:
    experts.register_buffer("other", torch.ones(1, EXPERTS))


def correction(experts: Any) -> None:
    experts.register_buffer("e_score_correction_bias", torch.zeros(EXPERTS))


def flat(experts: Any) -> None:
    experts.up = nn.Parameter(torch.ones(EXPERTS * INNER, WIDTH))
    experts.down = nn.Parameter(torch.ones(EXPERTS * INNER, 2, WIDTH))
    del experts.bias, experts.scale


def width(experts: Any) -> None:
    experts.more = nn.Parameter(torch.ones(EXPERTS))
    experts.down = nn.Parameter(torch.ones(EXPERTS, EXPERTS, INNER))


@pytest.mark.parametrize(
    ("change", "more", "said"),
    [
        (child, {}, "more.weight .* lies in a module inside of the experts"),
        (child_buffer, {}, "norm.scales is a buffer with a row for each expert"),
        (second, {}, "other .* that is not the first"),
        (second_buffer, {}, "other .* that is not the first"),
        (correction, {}, "e_score_correction_bias is a buffer"),
        (flat, {}, r"counts \[4\] experts itself"),
        (flat, {"expert_w1": "up"}, r"counts \[4\] experts itself"),
        (width, {}, "the number of experts and a width"),
        (None, {"expert_w1": "bias"}, None),
        (None, {"expert_w1": "nothing"}, "no parameter 'nothing'; it has up, down, bias, scale"),
        (None, {"num_experts_attr": "experts"}, "no number 'experts'"),
        (None, {"expert_pattern": "router"}, "no parameter whose first dimension|is called with"),
        (None, {"expert_pattern": "absent"}, "a child 'absent'"),
        (None, {"moe_layer_pattern": "block"}, "its modules are blocks, blocks.*"),
        (None, {"moe_layer_pattern": "(a+)+$"}, "may take for ever"),
        (None, {"moe_layer_pattern": r"(blocks|x)*\.\d+"}, "may take for ever"),
        (None, {"moe_layer_pattern": r".*.*.*.*.*.*.*.*\d"}, "may take for ever"),
    ],
)
def test_what_is_not_clear_is_refused(change: Callable[[Any], None] | None, more: dict[str, Any], said: str) -> None:
    model = Own()
    if change is not None:
        change(model.blocks[1].experts)
    if said is None:
        assert len(plan_experts(model, keys(**more), 2)[0].params) == 4
    else:
        with pytest.raises(ConfigError, match=said):
            plan_experts(model, keys(**more), 2)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"score_func": "sigmoid"}, None),
        ({"expert_activation": "geglu_tanh"}, "the model's own activation, which computes here too, has silu"),
        ({"expert_activation": "swiglu"}, None),
        ({"route_scale": 2.5}, "has 1.0"),
        ({"preset_model": "qwen3_moe"}, "the model is mixtral"),
    ],
)
def test_keys_that_say_something_else_than_the_model(more: dict[str, Any], said: str | None) -> None:
    settings = keys(**{"moe_layer_pattern": None, **more})
    if said is None:
        assert len(plan_experts(build("mixtral"), settings, 2)) == 2
    else:
        with pytest.raises(ConfigError, match=said):
            plan_experts(build("mixtral"), settings, 2)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"expert_w1": "up", "expert_w2": "up"}, "expert_w2 and expert_w1 are both 'up'"),
        ({"expert_pattern": "a.b"}, "not the name of one attribute"),
        ({"router_pattern": "(a+)+$"}, "not the name of one attribute"),
        ({"expert_pattern": ""}, "not the name of one attribute"),
        ({"top_k": "two"}, "neither a number nor auto"),
        ({"top_k": 0}, "not above 0"),
        ({"num_expert_groups": 4}, "says nothing without num_limited_groups"),
        ({"num_expert_groups": 4, "num_limited_groups": 5}, "cannot use 5 of 4 groups"),
        ({"gate_up_impl": "fused", "use_grouped_mm": False}, "use_grouped_mm switches off"),
        ({"row_weighting_impl": "fused"}, "no DeepEP here"),
        ({"expert_activation": "relu"}, "expert_activation"),
        ({"load_balance_coeff": 0.1}, "biases of routers"),
    ],
)
def test_keys_that_cannot_be(more: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        keys(**more)
