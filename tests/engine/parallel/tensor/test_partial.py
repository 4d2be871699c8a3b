"""Whole parameters that see a part of the activations: found by the graph, and by how models of transformers train."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, mse_loss
from torch.nn.functional import embedding as embedding_of
from torch.utils.checkpoint import checkpoint
from transformers import LlamaForCausalLM

import ds_hf
from ds_hf.deepspeed_api.pipeline import PipelineModule
from ds_hf.engine.comm.mesh import Axis
from ds_hf.engine.parallel.tensor.functions import Place, copy_to, gather_last, reduce_from, split_last
from ds_hf.engine.parallel.tensor.gathered import GatherReplacedLayerParams
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
        engine.backward(torch.zeros((), requires_grad=True))  # nor here
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


BY_OTHERS = ("by the script", "by a function", "by a redirected forward")


class Product(torch.autograd.Function):
    """As fused losses of other libraries have it inside."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, 1).T @ x.flatten(0, 1)


class Read(LlamaForCausalLM):  # type: ignore[misc]
    """A weight of a cut layer that is read by name, in ways of ``how``."""

    how = ""

    def forward(self, input_ids: Tensor, **_: Any) -> Tensor:
        embedding, head = self.model.embed_tokens, self.lm_head
        embeds = embedding_of(input_ids, embedding.weight) if self.how == "looked up" else embedding(input_ids)
        hidden = self.model(inputs_embeds=embeds.to(head.weight.dtype))[0]
        if self.how in BY_OTHERS:
            return hidden  # type: ignore[no-any-return]
        other = self.how in ("multiplied", "checkpointed", "reentrant")
        logits = self.multiply(hidden) if other else head(hidden)
        loss = cross_entropy(logits.flatten(0, 1), input_ids.flatten())
        return loss + head.weight.pow(2).sum() if self.how == "penalty inside" else loss

    def multiply(self, hidden: Tensor) -> Tensor:
        def product(hidden: Tensor) -> Tensor:
            return hidden @ self.lm_head.weight.T

        if self.how == "by a function":
            return Product.apply(hidden, self.lm_head.weight.to(hidden.dtype).t().t())  # type: ignore[no-any-return,no-untyped-call]
        if self.how in ("multiplied", *BY_OTHERS):
            return product(hidden)
        return checkpoint(product, hidden, use_reentrant=self.how == "reentrant")  # type: ignore[no-any-return]


def read_of(how: str, *, frozen: bool, adapters: bool) -> Read:
    model = Read(build("llama").config).double()
    model.how = how
    model._tp_plan = {**(model._tp_plan or {}), "model.embed_tokens": "embedding_rowwise"}
    model.lm_head.requires_grad_(not frozen)
    model.model.embed_tokens.requires_grad_(not frozen)
    if adapters:
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False))
        model = model.double()
    return model


PENALTIES: dict[str, Callable[[Tensor], Tensor]] = {
    "penalty": lambda w: w.pow(2).sum() + mse_loss(w, torch.ones_like(w), reduction="sum"),
    "norm": lambda w: w.norm(),
    "mean": lambda w: w.pow(2).mean(),
    "root": lambda w: torch.stack([w.pow(2).sum()]).sum().sqrt(),
}


def redirected(called: Any, model: Any, ids: Tensor) -> Tensor:
    """As TRL's ``DistillationTrainer`` calls the model, so that its own function runs inside."""
    forward = model.forward

    def instead(**kwargs: Any) -> Tensor:
        model.forward = forward
        return cross_entropy(model.multiply(forward(**kwargs)).flatten(0, 1), ids.flatten())

    model.forward = instead
    return called(input_ids=ids)  # type: ignore[no-any-return]


def loss_of_read(called: Any, model: Any, ids: Tensor) -> Tensor:
    if model.how == "by a redirected forward":
        return redirected(called, model, ids)
    loss: Tensor = called(input_ids=ids)
    if model.how in BY_OTHERS:
        loss = cross_entropy(model.multiply(loss).flatten(0, 1), ids.flatten())
    elif model.how in PENALTIES:
        loss = loss + PENALTIES[model.how](model.lm_head.weight)
    elif model.how == "norm of all":
        with GatherReplacedLayerParams([model.lm_head.weight]):
            loss = loss + model.lm_head.weight.norm()
    elif model.how == "gathered":
        with GatherReplacedLayerParams([model.lm_head.weight]):
            loss = loss + torch.stack([model.lm_head.weight @ torch.ones(32).double()]).sum()
    return loss


FROZEN, TRAINED, ADAPTED = ((frozen, adapters) for frozen, adapters in ((True, False), (False, False), (True, True)))
READS: tuple[tuple[str, tuple[bool, bool], int], ...] = (
    *(("multiplied", FROZEN, 0), ("multiplied", ADAPTED, 3), ("checkpointed", ADAPTED, 1), ("reentrant", ADAPTED, 0)),
    *(("reentrant", TRAINED, 3), ("by the script", ADAPTED, 1), ("by the script", TRAINED, 1)),
    *(("looked up", FROZEN, 0), ("looked up", ADAPTED, 3)),
    *(("by a function", TRAINED, 0), ("by a function", ADAPTED, 1), ("by a redirected forward", ADAPTED, 0)),
    *(("norm", TRAINED, 0), ("mean", TRAINED, 0), ("root", TRAINED, 1)),
)
RIGHT: tuple[tuple[str, tuple[bool, bool], int], ...] = (
    *(("right", ADAPTED, 3), ("right", FROZEN, 0), ("gathered", ADAPTED, 1)),
    *(("penalty", TRAINED, 1), ("penalty inside", TRAINED, 0), ("norm of all", TRAINED, 1)),
)
IDS = torch.arange(20).view(2, 10) % 13  # the first process has all of these words


def said_of_reads() -> tuple[list[str], list[dict[str, Tensor]]]:
    """What is said of wrong reads; of right ones what a step changed."""
    said, changes = list[str](), list[dict[str, Tensor]]()
    for how, (frozen, adapters), stage in (*READS, *RIGHT):
        model = read_of(how, frozen=frozen, adapters=adapters)
        before = copy.deepcopy(model)
        engine, *_ = ds_hf.initialize(model=model, config=config(stage))
        try:
            engine.backward(loss_of_read(engine, model, IDS))
            engine.step()
        except ConfigError as error:
            said.append(str(error))
        else:
            with GatheredParameters(list(model.parameters())):
                after = whole(dict(model.named_parameters()), model, engine.mesh.axis("tensor"))
            changes.append({name: (param - after[name]).detach() for name, param in before.named_parameters()})
        finally:
            engine.destroy()
    return said, changes


def test_frozen_and_hidden_parts_that_other_code_takes_for_all_are_refused() -> None:
    """A frozen head whose weight is multiplied by had a loss 0.7 off, in silence."""
    for said, changes in run_distributed(said_of_reads, 2):
        assert len(said) == len(READS)
        for text, (how, *_) in zip(said, READS, strict=True):
            layer = "embed_tokens" if how == "looked up" else "lm_head"
            assert f"{layer}.weight: each process has a part, and the loss is computed of that part as if it" in text
        for found, (how, (frozen, adapters), _) in zip(changes, RIGHT, strict=True):
            model = read_of(how, frozen=frozen, adapters=adapters)
            loss_of_read(model, model, IDS).backward()
            for name, param in model.named_parameters():
                expected = torch.zeros_like(param) if param.grad is None else param.grad
                torch.testing.assert_close(found[name], expected, rtol=1e-6, atol=1e-9)


class Head(nn.Module):
    def __init__(self, *, calls: bool, frozen: bool) -> None:
        super().__init__()
        self.norm, self.lm_head, self.calls = nn.LayerNorm(8), nn.Linear(8, 16, bias=False), calls
        self.lm_head.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.lm_head(x) if self.calls else x @ self.lm_head.weight.T  # type: ignore[no-any-return]


class Column(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())  # type: ignore[no-any-return]


def stages_of(*, calls: bool, frozen: bool) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(8, 8), Column(), Column(), Head(calls=calls, frozen=frozen)]


LABELS = torch.tensor([3, 5])
HEAD = {"patterns": [r".*lm_head\.weight$"], "partition_type": "column", "gather_output": True}


def losses_of_pipelines() -> list[Any]:
    found = list[Any]()
    rules = {"use_default_specs": False, "layer_specs": [*SECTION["layer_specs"], HEAD]}
    for calls, frozen in ((True, False), (True, True), (False, False), (False, True)):
        layers = stages_of(calls=calls, frozen=frozen)
        module = PipelineModule(layers, num_stages=1, loss_fn=cross_entropy)
        engine, *_ = ds_hf.initialize(model=module, config=config(0, partition_config=rules))
        try:
            found.append([float(engine.train_batch(iter([(torch.eye(8)[:2], LABELS)]))) for _ in range(2)])
        except ConfigError as error:
            found.append(str(error))
        finally:
            engine.destroy()
    return found


def test_heads_of_pipelines() -> None:
    """One that is called was refused as if it gave a part; one that was multiplied by trained on a part."""
    for *right, trained, frozen in run_distributed(losses_of_pipelines, 2):
        for losses, is_frozen in zip(right, (False, True), strict=True):
            model = nn.Sequential(*stages_of(calls=True, frozen=is_frozen))
            (first := cross_entropy(model(torch.eye(8)[:2]), LABELS)).backward()
            with torch.no_grad():
                for param in model.parameters():
                    param.sub_(param.grad if param.grad is not None else 0.0)
            second = cross_entropy(model(torch.eye(8)[:2]), LABELS)
            assert losses == pytest.approx([float(first.detach()), float(second.detach())], rel=1e-5)
        for text in (trained, frozen):
            assert "lm_head.weight: each process has a part, and the loss is computed of that part" in text


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
    for given, expected in ((weight, "given"), (weight.double(), "given"), (weight * 2, "unknown")):
        assert sides_of(Hidden.apply(torch.ones(4), given))[id(weight)] == {expected}  # type: ignore[no-untyped-call]


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
