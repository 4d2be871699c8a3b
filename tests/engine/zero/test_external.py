"""A weight that the model's own forward reads, as fused losses do: gathered when it is read, and for backward."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from ds_hf import Engine, initialize
from ds_hf.engine.zero import planning
from ds_hf.engine.zero.external import register_external_parameter
from ds_hf.engine.zero.gather import GatheredParameters
from tests.helpers.distributed import DistributedFailure, run_distributed
from tests.helpers.models import Block, token_batches
from tests.helpers.parity import Outcome, base_config, sgd, train_both

VOCAB, WIDTH = 1024, 16
SGD = {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}
EAGER = "aot_eager"


class FusedLoss(torch.autograd.Function):
    """Mean cross-entropy of ``hidden @ weight.t()`` whose gradients are computed in forward, as Liger's are."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: nn.Parameter, labels: Tensor) -> Tensor:
        logits = hidden @ weight.t()
        loss = F.cross_entropy(logits, labels)
        errors = (logits.softmax(-1) - F.one_hot(labels, len(weight))) / len(labels)
        ctx.save_for_backward(errors @ weight, errors.t() @ hidden if weight.requires_grad else None)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        of_hidden, of_weight = ctx.saved_tensors
        return of_hidden * grads[0], None if of_weight is None else of_weight * grads[0], None


class SavesWeight(torch.autograd.Function):
    """``hidden @ weight.t()`` that keeps the parameter itself for backward, as TRL's head does."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: nn.Parameter) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return hidden @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        hidden, weight = ctx.saved_tensors
        return grads[0] @ weight, grads[0].t() @ hidden if ctx.needs_input_grad[1] else None


class Reader(nn.Module):
    """A language model whose forward reads the head's weight; ``way`` names the method that does."""

    def __init__(self, way: str, *, tied: bool = False, frozen: bool = False, checkpointing: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        for name, param in self.named_parameters():
            param.requires_grad_(not frozen or "blocks" in name)
        self.way, self.checkpointing = way, checkpointing

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            through = getattr(self, f"through_{self.way}", block)
            through = through if through is block else partial(through, block)
            hidden = checkpoint(through, hidden, use_reentrant=False) if self.checkpointing else through(hidden)
        loss: Tensor = getattr(self, self.way)(self.norm(hidden).flatten(0, 1), tokens.flatten())
        return loss

    def through_past(self, block: Block, hidden: Tensor) -> Tensor:
        """As SqueezeBERT calls its layers, which no hook sees."""
        return block.forward(hidden)

    def through_inside(self, block: Block, hidden: Tensor) -> Tensor:
        """Some of what is inside, the last parameter first, and then the block."""
        hidden = hidden + 0.1 * F.linear(block.up(hidden), block.down.weight)
        result: Tensor = block(hidden) if block is self.blocks[1] else hidden
        return result

    def through_operators(self, block: Block, hidden: Tensor) -> Tensor:
        """Beside a tensor that Python would not ask first."""
        return (block(hidden) / block.norm.weight).add_(block.norm.bias)

    def called(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(hidden), labels)

    past = inside = operators = called

    def product(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(hidden @ self.head.weight.t(), labels)

    def gathered(self, hidden: Tensor, labels: Tensor) -> Tensor:
        weight = self.head.weight
        with GatheredParameters([weight]):
            return F.cross_entropy(SavesWeight.apply(hidden, weight), labels)

    def fused(self, hidden: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = FusedLoss.apply(hidden, self.head.weight, labels)
        return loss

    def skips(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return hidden.square().mean()

    def several(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Called and read, more than once, also only looked at."""
        shift = self.head.weight.detach().square().mean()
        return self.called(hidden, labels) + self.product(hidden, labels) + self.fused(hidden, labels) * shift

    def chunks(self, hidden: Tensor, labels: Tensor, *, reentrant: bool = False) -> Tensor:
        parts = [
            checkpoint(self.product, h, y, use_reentrant=reentrant)
            for h, y in zip(hidden.chunk(2), labels.chunk(2), strict=True)
        ]
        return torch.stack(parts).mean()

    def chunks_reentrant(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return self.chunks(hidden, labels, reentrant=True)

    def input_weight(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Another way to tie: of a module that was called before the blocks."""
        return F.cross_entropy(F.linear(hidden, self.embedding.weight), labels)

    def penalty(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Beside a call that was over before."""
        return self.called(hidden, labels) + 1e-3 * self.head.weight.square().sum()

    def in_backward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Read again while backward runs, by something that computes in its own backward."""
        return F.cross_entropy(LateProduct.apply(hidden, self.head.weight, self.head), labels)


class LateProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: nn.Parameter, head: nn.Linear) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.head = head
        return hidden @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        return grads[0] @ ctx.head.weight, grads[0].t() @ ctx.saved_tensors[0], None


WAYS = (
    "product", "gathered", "fused", "several", "chunks", "chunks_reentrant", "input_weight", "penalty", "in_backward",
    "past", "inside", "operators",
)  # fmt: skip
KINDS = {
    "untied": {},
    "tied": {"tied": True},
    "frozen": {"frozen": True},
    "checkpointing": {"checkpointing": True},
    "frozen, checkpointing": {"frozen": True, "checkpointing": True},
}


def data(steps: int, micro: int = 1) -> Tensor:
    """Tokens of the whole vocabulary, ``[step, micro-batch, rank, sample, position]``."""
    return token_batches(steps, micro, dist.get_world_size(), 2, 5, vocab=VOCAB)


def build(way: str, kind: str = "untied") -> Any:
    planning.LARGE_LEAF_NUMEL = VOCAB * WIDTH  # the head is a unit of its own
    torch.manual_seed(4)
    if kind == "adapters":
        return get_peft_model(Reader(way), LoraConfig(r=2, target_modules=["up", "down"], init_lora_weights="gaussian"))  # type: ignore[arg-type]
    return Reader(way, **KINDS[kind])


def call(model: nn.Module, tokens: Tensor) -> Tensor:
    loss: Tensor = model(tokens)
    return loss


def outcome(way: str, kind: str = "untied", micro: int = 1, backwards: Any = None, **config: Any) -> Outcome:
    """Distance from plain torch over two steps, at stage 3 by default."""
    settings = base_config(3, **{"optimizer": SGD, **config})
    model = build(way, kind)
    same = f"{way} {kind} {micro}"
    return train_both(model, call, data(2, micro), settings, reference_optimizer=sgd, backwards=backwards, same=same)


def wrong(outcomes: dict[str, Outcome], limit: float = 2e-6) -> dict[str, Outcome]:
    """Gradients of three ranks are summed and then divided by 3, those of the reference the other way round: 1.1e-6 of
    the weights."""
    return {name: o for name, o in outcomes.items() if max(o.losses, o.weights, o.norms) > limit}


def ways_of_kinds(ways: Sequence[str], kinds: Sequence[str]) -> dict[str, Outcome]:
    return {f"{way}, {kind}": outcome(way, kind) for kind in kinds for way in ways}


def test_every_way_to_read() -> None:
    for outcomes in run_distributed(ways_of_kinds, 2, WAYS, ["untied"], timeout=100):
        assert wrong(outcomes) == {}


def test_kinds_of_models() -> None:
    for outcomes in run_distributed(
        ways_of_kinds, 2, ["gathered", "fused", "past", "inside", "operators"], list(KINDS)[1:], timeout=100
    ):
        assert wrong(outcomes) == {}


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(KINDS)[1:])
def test_every_way_with_every_kind(kind: str) -> None:
    for outcomes in run_distributed(ways_of_kinds, 2, WAYS, [kind], timeout=100):
        assert wrong(outcomes) == {}


def raw_backward(engine: Engine, loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def other_settings(ways: Sequence[str], kinds: Sequence[str]) -> dict[str, Outcome]:
    """Other stages, accumulation, a backward that is not the engine's, parameters in host memory."""
    found = {}
    host = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
    for kind in kinds:
        for way in ways:
            name = f"{way}, {kind}"
            for stage in range(3):
                found[f"stage {stage}: {name}"] = outcome(way, kind, zero_optimization={"stage": stage})
            found[f"accumulation: {name}"] = outcome(way, kind, micro=2)
            found[f"raw: {name}"] = outcome(way, kind, micro=2, backwards=raw_backward)
            found[f"offload: {name}"] = outcome(way, kind, **host)
    return found


def test_other_settings() -> None:
    for outcomes in run_distributed(other_settings, 2, ["fused", "inside"], ["untied"], timeout=100):
        assert wrong(outcomes) == {}


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3])
def test_other_settings_with_other_ways(world: int) -> None:
    ways = ["product", "gathered", "several", "chunks_reentrant", "past"]
    for outcomes in run_distributed(other_settings, world, ways, ["untied", "frozen"], timeout=100):
        assert wrong(outcomes) == {}


def from_later_on(evaluation: bool) -> str:
    """Blocks are called at first, and left out then: in the first evaluation, or in a step. What a step is told."""
    engine, plain = engine_of("called"), build("past")
    first, tokens = data(2)[:, 0, dist.get_rank()]
    for _ in range(3):  # each block is released twice
        engine.backward(engine(first))
    engine.train(not evaluation)
    engine.module.way = "past"
    said = ""
    with torch.set_grad_enabled(not evaluation):
        try:
            loss = engine(tokens)
        except RuntimeError as error:
            said = " ".join([str(error), *getattr(error, "__notes__", [])])
            loss = engine(tokens)
        assert float(loss) == pytest.approx(float(plain(tokens)), rel=1e-6)
    if not evaluation:
        engine.backward(loss)
    engine.destroy()
    return said


def all_from_later_on() -> None:
    assert from_later_on(evaluation=True) == ""
    assert wrong({"adapters": outcome("inside", "adapters")}) == {}
    assert "Call the block, or deepspeed.zero.register_external" in from_later_on(evaluation=False)


def test_blocks_that_are_left_out_from_later_on() -> None:
    run_distributed(all_from_later_on, 2, timeout=60)


# -- when it is gathered, and when reduced ---------------------------------------------------------------------------


def engine_of(way: str, kind: str = "untied", **more: Any) -> Engine:
    return initialize(model=build(way, kind), config=base_config(3, optimizer=SGD, **more))[0]


def here(engine: Engine) -> bool:
    """Whether the head's weights are."""
    return bool(engine.module.head._parameters.get("weight").numel())  # type: ignore[union-attr]


def third_step(way: str, kind: str) -> list[str]:
    """What it issues, and where blocks begin to compute."""
    engine = engine_of(way, kind, ds_hf={"join_blocks": False})
    entries = engine.axis.log.entries
    for index, block in enumerate(engine.module.blocks):
        block.register_forward_pre_hook(lambda *_, index=index: entries.append(("forward", f"block {index}", 0, "")))
    for tokens in data(3)[:, 0, dist.get_rank()]:
        entries.clear()
        engine.backward(engine(tokens))
        issued = [f"{operation} {what}" for operation, what, *_ in entries]
        engine.step()
    assert not here(engine)
    engine.destroy()
    return issued


def orders() -> list[tuple[str, str, list[str]]]:
    return [
        (way, kind, third_step(way, kind)) for kind in ("untied", "frozen") for way in ("called", "fused", "chunks")
    ]


def test_the_same_collectives_as_for_a_head_that_is_called() -> None:
    """Gathered beside the last block, kept for backward, reduced once, before the first block is."""
    first, second = run_distributed(orders, 2, timeout=60)
    assert first == second
    issued = {(way, kind): entries for way, kind, entries in first}
    for kind in ("untied", "frozen"):
        called = issued["called", kind]
        assert issued["fused", kind] == called
        assert issued["chunks", kind] == called
        assert called.index("forward block 1") < called.index("all-gather the weights of head")
        assert called.index("all-gather the weights of head") < called.index("forward block 2")
        assert called.count("all-gather the weights of head") == 1
    reduced = [entry for entry in issued["fused", "untied"] if entry.startswith("reduce-scatter")]
    assert reduced[:2] == ["reduce-scatter the gradients of head", "reduce-scatter the gradients of blocks.2"]
    assert len(set(reduced)) == len(reduced)


def same_as_registered() -> None:
    """DeepSpeed's way to say it: to the bit the same."""
    losses = []
    for registered in (False, True):
        model = build("fused")
        if registered:
            register_external_parameter(model, model.head.weight)
        engine = initialize(model=model, config=base_config(3, optimizer=SGD))[0]
        losses.append([])
        for tokens in data(3)[:, 0, dist.get_rank()]:
            loss = engine(tokens)
            engine.backward(loss)
            engine.step()
            losses[-1] += [loss.item(), engine.get_global_grad_norm()]
        engine.destroy()
    assert losses[0] == losses[1]


def patterns(way: str) -> list[float]:
    """Losses and norms of steps that are more than one forward and one backward."""
    engine = engine_of(way, bf16={"enabled": True})
    one, two, three = data(3)[:, 0, dist.get_rank()]
    seen = []

    def backward(*losses: Tensor) -> None:
        for loss in losses:
            engine.backward(loss)
            seen.append(loss.item())
            assert not here(engine)
        engine.step()
        seen.append(engine.get_global_grad_norm() or 0.0)

    backward(engine(one) + engine(two))
    with torch.no_grad():
        seen.append(engine(three).item())
    assert not here(engine)
    first, second = engine(one), engine(two)
    engine.eval()
    with torch.no_grad():
        seen.append(engine(three).item())
    engine.train()
    backward(second, first)
    with GatheredParameters(engine.module.parameters()):
        loss = engine(three)
    backward(loss)
    with pytest.raises(IndexError):
        engine(one + VOCAB)
    with GatheredParameters(engine.module.parameters()):
        seen.append(engine(one).item())
    backward(engine(one))
    engine.destroy()
    return seen


def all_patterns() -> None:
    same_as_registered()
    expected = patterns("called")
    for way in ("fused", "gathered", "chunks", "chunks_reentrant"):
        assert patterns(way) == pytest.approx(expected, rel=2e-2), way
    for way in ("product",):
        assert patterns(way) == expected


def test_steps_of_several_forwards_and_backwards() -> None:
    run_distributed(all_patterns, 2, timeout=100)


def another_way_on_rank_1() -> None:
    engine = engine_of("skips" if dist.get_rank() else "product", ds_hf={"hang_timeout": 2.0})
    engine.backward(engine(data(1)[0, 0, dist.get_rank()]))


def test_ranks_that_do_not_all_read() -> None:
    with pytest.raises(DistributedFailure) as failure:
        run_distributed(another_way_on_rank_1, 2, timeout=50)
    text = str(failure.value)
    assert "DivergenceError: the ranks of this run issue different collectives" in text
    assert "rank 0: all-gather of the weights of head" in text


# -- the dictionary --------------------------------------------------------------------------------------------------


def outside_of_a_call() -> None:
    """Nothing is gathered, and copies are ordinary modules."""
    engine = engine_of("product")
    model = engine.module
    entries = engine.axis.log.entries
    entries.clear()
    assert model.head.weight.numel() == 0
    with pytest.raises(RuntimeError, match="size mismatch"):
        torch.ones(1, WIDTH) @ model.head.weight.t()
    assert not entries
    tokens = data(1)[0, 0, 0]
    loss = engine(tokens).item()
    with GatheredParameters(model.parameters()):
        names = [name for name, _ in model.named_parameters()]
        assert names == list(model.state_dict())
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        others = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)]
        weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    for other in others:
        assert type(other.head._parameters) is dict
        assert [name for name, _ in other.named_parameters()] == names
        assert float(other(tokens)) == pytest.approx(loss)
    assert float(torch.func.functional_call(model, weights, (tokens,))) == pytest.approx(loss)
    assert not here(engine)
    engine.destroy()
    assert type(model.head._parameters) is dict


def replaced() -> None:
    """What others put in its place stays, and is not gathered."""
    tokens = data(1)[0, 0, 0]
    engine = engine_of("product")
    own = nn.Parameter(torch.zeros(VOCAB, WIDTH))
    engine.module.head.weight = own
    assert float(engine(tokens)) == pytest.approx(float(torch.tensor(VOCAB).log()), rel=1e-6), "equal logits"
    engine.module.head._parameters = {"weight": own}
    engine.destroy()
    assert engine.module.head._parameters == {"weight": own}
    engine = engine_of("product")
    with GatheredParameters(engine.module.parameters()):
        parametrize.register_parametrization(engine.module.head, "weight", nn.Identity())
        parametrize.remove_parametrizations(engine.module.head, "weight")
    engine.backward(engine(tokens))
    engine.destroy()


def second_engine() -> None:
    tokens = data(1)[0, 0, 0]
    first = engine_of("product")
    loss = float(first(tokens))
    second = initialize(model=first.module, config=base_config(3, optimizer=SGD))[0]
    first.destroy()
    loss_of_second = second(tokens)
    assert float(loss_of_second) == pytest.approx(loss)
    second.backward(loss_of_second)
    second.step()
    assert float(second(tokens)) < loss
    third = initialize(model=second.module, config=base_config(0, optimizer=SGD))[0]
    assert type(third.module.head._parameters) is dict
    third.backward(third(tokens))
    third.step()


def lives() -> None:
    outside_of_a_call()
    replaced()
    second_engine()


@pytest.mark.parametrize("world", [1, 2])
def test_what_is_watched_is_an_ordinary_module(world: int) -> None:
    run_distributed(lives, world, timeout=60)


# -- torch.compile ---------------------------------------------------------------------------------------------------


def losses_of(engine: Engine) -> list[float]:
    found = []
    for tokens in data(3)[:, 0, dist.get_rank()]:
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
        found += [loss.item(), engine.get_global_grad_norm() or 0.0]
    return found


def compiled() -> None:
    expected = losses_of(engine_of("several"))
    engine = engine_of("several")
    engine.compile(backend=EAGER)
    assert losses_of(engine) == pytest.approx(expected, rel=1e-6)
    report = engine.compile_report()
    assert report.breaks == {}
    engine.destroy()
    torch._dynamo.reset()
    # a compiled function that reads the weight itself
    expected = losses_of(engine_of("product"))
    model = build("product")
    model.product = torch.compile(model.product, backend=EAGER)  # type: ignore[method-assign]
    engine = initialize(model=model, config=base_config(3, optimizer=SGD))[0]
    assert losses_of(engine) == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_compiled() -> None:
    run_distributed(compiled, 2, timeout=100)
