"""Whole parameters that see a part of the activations: found by the graph, and by how models of transformers train."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear
from transformers import LlamaForCausalLM

import ds_hf
from ds_hf.engine.comm.mesh import Axis
from ds_hf.engine.parallel.tensor.functions import Place, copy_to, gather_last, reduce_from, split_last
from ds_hf.engine.parallel.tensor.partial import sides_of
from ds_hf.engine.zero.gather import GatheredParameters
from ds_hf.errors import ConfigError
from tests.helpers.distributed import run_distributed
from tests.helpers.experts import FAMILIES, batches_of, build, loss_of
from tests.helpers.experts import planned as there
from tests.helpers.tensor import whole

# Those of which a plan says nothing of heads' norms, a packed weight, an embedding's norm.
FEW = ("qwen3_vl_moe", "inkling")
# Blocks whose hidden states have a dimension of their own, or are flat inside; layers of which none in a block is cut.
REFUSED = ("deepseek_v4", "gemma4", "hy_v4", "hy_v4_vl", "qwen4_exp", "gpt_oss")
SECTION = {
    "layer_specs": [
        {"patterns": [r".*up\.weight$"], "partition_type": "column"},
        {"patterns": [r".*down\.weight$"], "partition_type": "row"},
    ]
}


class Scaled(nn.Module):
    """A learned scale between two layers of which each process has a part: ``[1]``, so that it fits a part."""

    def __init__(self, *, inside: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.scale = nn.Parameter(torch.ones(1))
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(self.first(x))
        x = self.down(x * self.scale) if self.inside else self.down(x) * self.scale
        return x.pow(2).mean()  # type: ignore[no-any-return]


def config(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_optimization": {"stage": stage},
        "tensor_parallel": {"autotp_size": 2, **more},
    }


def told(stage: int, inside: bool, plan: dict[str, str] | None = None) -> str:
    settings = config(stage) if plan else config(stage, partition_config=SECTION)
    model = Scaled(inside=inside)
    model._tp_plan = plan  # type: ignore[assignment]
    engine, *_ = ds_hf.initialize(model=model, config=settings)
    with torch.no_grad():
        engine(torch.ones(2, 8))  # there is no graph yet
    try:
        engine(torch.ones(2, 8))
    except ConfigError as error:
        return str(error)
    finally:
        engine.destroy()
    return ""


PLAN = {"up": "colwise", "down": "rowwise"}
SUMMED = {**PLAN, "scale": "replicated_with_grad_allreduce"}


def all_told() -> list[list[str]]:
    found = [[told(stage, inside) for stage in (0, 3)] for inside in (True, False)]
    return [*found, [told(1, True, PLAN), told(1, False, SUMMED)], [told(1, True, SUMMED), told(1, False, PLAN)]]


def test_what_a_division_leaves_out_is_said_before_training() -> None:
    for by_rules, right, planned, as_advised in run_distributed(all_told, 2):
        assert right == as_advised == ["", ""]
        for text in (*by_rules, *planned):
            assert "scale: whole on each process, and computing with a part of the activations" in text
            assert "leave the layers around it whole" in text
        assert 'model._tp_plan["scale"] = "replicated_with_grad_allreduce"' in planned[0]
        assert not any("_tp_plan" in text for text in by_rules)


class Multiplied(LlamaForCausalLM):  # type: ignore[misc]
    """A loss of its own, which takes the head's weight for all of the words."""

    def forward(self, input_ids: Tensor, **_: Any) -> Tensor:
        return cross_entropy(linear(self.model(input_ids)[0], self.lm_head.weight).flatten(0, 1), input_ids.flatten())


class Returned(nn.Module):
    """What a column gives is taken for all: the loss is computed here, or by the script."""

    def __init__(self, *, loss: bool) -> None:
        super().__init__()
        self.inner, self.up, self.loss = nn.Linear(8, 8), nn.Linear(8, 16), loss

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(self.inner(x))
        return x.logsumexp(-1).mean() if self.loss else x


def all_of_cut_layers() -> list[str]:
    """What is said of each, and whether the outputs of the last one are half of them."""
    found = []
    llama = Multiplied(build("llama").config)
    up: dict[str, Any] = {"partition_config": {"use_default_specs": False, "layer_specs": SECTION["layer_specs"][:1]}}
    for model, more in (
        (llama, {}),
        (llama, {"vocab_parallel_lm_head": True}),
        (Returned(loss=True), up),
        (Returned(loss=False), up),
    ):
        given = torch.ones(2, 8) if isinstance(model, Returned) else torch.ones(2, 8).long()
        engine, *_ = ds_hf.initialize(model=copy.deepcopy(model), config=config(0, **more))
        try:
            found.append(str(tuple(engine(given).shape)))
        except ConfigError as error:
            found.append(str(error))
        finally:
            engine.destroy()
    return found


def test_parts_of_cut_layers_that_are_taken_for_all_are_refused() -> None:
    """Losses were those of half of the words, in silence, and an error of a first call was hidden by torch's own."""
    for *refused, logits in run_distributed(all_of_cut_layers, 2):
        for text, layer in zip(refused, ("lm_head", "lm_head", "up"), strict=True):
            assert "the loss is computed of that part as if it were all" in text
            assert f"call {layer}, with" in text
        assert logits == "(2, 8)"  # which is told, and not refused


def test_sides_change_at_the_four_functions() -> None:
    place = Place(Axis(None, 0, 1), "layer", [None])
    weights = [torch.ones(4, 4, requires_grad=True) for _ in range(4)]
    outer, inner, gathered, split = weights
    x = reduce_from(copy_to(torch.ones(2, 4) * outer[0], place) @ inner, place)
    x = gather_last(x @ gathered, place) + split_last(torch.ones(2, 4) @ split, place)
    found = {id(w): sides for w, sides in ((w, sides_of(x.sum()).get(id(w))) for w in weights)}
    assert found == {id(outer): {"whole"}, id(inner): {"part"}, id(gathered): {"part"}, id(split): {"whole"}}


class Hidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad * weight, grad * x


def test_nothing_is_concluded_of_what_a_function_hides() -> None:
    weight = torch.ones(4, requires_grad=True)
    found = sides_of(Hidden.apply(torch.ones(4), weight))  # type: ignore[no-untyped-call]
    assert found[id(weight)] == {"unknown"}


def made(kind: str) -> nn.Module:
    """Gradients are of a size that can be compared: transformers' usual values are for wider models."""
    model = build(kind).double()
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() > 1:
                param.mul_(4)
    return model


def step_of(kinds: tuple[str, ...], own: dict[str, Any]) -> dict[str, tuple[float, dict[str, Tensor]]]:
    """Losses and whole gradients of two processes that share layers."""
    torch.set_num_threads(1)
    found = {}
    for kind in kinds:
        model = made(kind)
        before = {name: param.detach().clone() for name, param in model.named_parameters()}
        engine, *_ = ds_hf.initialize(model=model, config={**config(0), "ds_hf": own})
        loss = loss_of(engine, batches_of(1, 1, 1)[0][0])
        engine.backward(loss)
        engine.step()
        with GatheredParameters(list(model.parameters())):
            after = {name: param.detach().clone() for name, param in model.named_parameters()}
        after = whole(after, model, engine.mesh.axis("tensor"))
        engine.destroy()
        found[kind] = (float(loss.detach()), {name: before[name] - after[name] for name in before})
    return found


def check(kinds: tuple[str, ...], timeout: float, own: dict[str, Any]) -> None:
    first = run_distributed(step_of, 2, kinds, own, timeout=timeout)[0]
    for kind, (loss, gradients) in first.items():
        model = made(kind)
        expected = loss_of(model, batches_of(1, 1, 1)[0][0])
        expected.backward()
        assert loss == pytest.approx(float(expected.detach()), rel=1e-7), kind
        for name, param in model.named_parameters():
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            # routers and recurrences compute in fp32 whatever the model's dtype
            far = float((gradients[name] - grad).abs().max() / grad.abs().max().clamp_min(1e-6))
            assert far < 1e-5, (kind, name, far)


def test_models_whose_plans_leave_something_out() -> None:
    check(FEW, 60, {})


@pytest.mark.slow
@pytest.mark.parametrize("own", [{}, {"tensor_sequence_parallel": True}], ids=["", "divided tokens"])
def test_all_mixtures_of_experts_with_layers_shared(own: dict[str, Any]) -> None:
    kinds = tuple(kind for kind in there(FAMILIES) if getattr(build(kind).config, "base_model_tp_plan", None))
    if own:
        kinds = tuple(kind for kind in kinds if kind not in REFUSED)
    assert len(kinds) >= 40
    check(kinds, 500, own)
