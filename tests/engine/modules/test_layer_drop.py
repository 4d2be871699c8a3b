"""Progressive layer drop: numbers are those of a plain model whose blocks are called by hand, or not."""

from __future__ import annotations

import math
import random
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hf import initialize
from tests.compat.trainer_code import tiny_llama
from tests.engine.modules.test_token_drop import section as dropped_tokens
from tests.helpers.distributed import run_distributed

DEPTH, THETA, GAMMA = 4, 0.3, 0.5


def settings(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
        "progressive_layer_drop": {"enabled": True, "theta": THETA, "gamma": GAMMA},
    }


def batch(step: int, rank: int) -> dict[str, Tensor]:
    tokens = torch.randint(1, 128, (2, 12), generator=torch.Generator().manual_seed(10 * step + rank))
    return {"input_ids": tokens, "labels": tokens}


def loss_by_hand(plain: Any, step: int, rank: int) -> tuple[Tensor, int]:
    given, base, left_out = batch(step, rank), plain.model, 0
    hidden = base.embed_tokens(given["input_ids"])
    rotary = base.rotary_emb(hidden, position_ids=torch.arange(12)[None])
    theta = (1 - THETA) * math.exp(-GAMMA * step) + THETA
    for index, block in enumerate(base.layers):
        share = 1 - (index + 1) / DEPTH * (1 - theta)
        if random.Random(f"1234 {step} 1 {index}").random() >= share:
            left_out += 1
            continue
        hidden = hidden + (block(hidden, position_embeddings=rotary) - hidden) / share
    logits = plain.lm_head(base.norm(hidden))
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), given["labels"][:, 1:].flatten()), left_out


def by_hand(world: int = 2) -> tuple[list[float], int]:
    plain = tiny_llama(num_hidden_layers=DEPTH).train()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    losses, left_out = [], 0
    for step in range(6):
        found = [loss_by_hand(plain, step, rank) for rank in range(world)]
        loss = torch.stack([each for each, _ in found]).mean()
        left_out += found[0][1]
        for param in plain.parameters():
            param.grad = torch.zeros_like(param)  # as ZeRO has them of what was not computed
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, left_out


def train(engine: Any, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        loss = engine(**batch(step, dist.get_rank())).loss
        engine.backward(loss)
        engine.step()
        found = loss.detach().clone()
        dist.all_reduce(found)
        losses.append(found.item() / 2)
    return losses


def stages(folder: str, compiled: bool) -> dict[int, list[float]]:
    result = {}
    for stage in (2,) if compiled else (0, 1, 2, 3):
        losses: list[float] = []
        for first, last in ((0, 3), (3, 6)):
            net = tiny_llama(num_hidden_layers=DEPTH).train()
            if stage == 3:
                net.gradient_checkpointing_enable()
            engine, *_ = initialize(model=net, config=settings(stage))
            if compiled:
                engine.compile(backend="aot_eager")
                assert engine.compile_report().modules == DEPTH
            if first:
                engine.load_checkpoint(folder, tag=f"stage{stage}")
            losses += train(engine, first, last)
            if not first:
                engine.save_checkpoint(folder, tag=f"stage{stage}")
                if stage == 1:  # and back to it, from the middle of a step
                    engine(**batch(3, dist.get_rank()))
                    engine.load_checkpoint(folder, tag="stage1")
                    again = train(engine, 3, 6)
            engine.destroy()
            assert all("forward" not in vars(block) for block in net.model.layers)
        result[stage] = losses
        assert stage != 1 or again == losses[3:]
    return result


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"])
def test_two_processes_at_every_stage_resumed_in_the_middle(tmp_path: Path, compiled: bool) -> None:
    wanted, left_out = by_hand()
    assert 3 < left_out < 20
    for found in run_distributed(stages, 2, str(tmp_path), compiled, timeout=90):
        for losses in found.values():
            assert losses == pytest.approx(wanted, abs=5e-5)


def alone(stage: int, offload: bool) -> list[float]:
    file = settings(stage)
    if offload:
        file["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    engine, *_ = initialize(model=tiny_llama(num_hidden_layers=DEPTH).train(), config=file)
    losses = []
    for step in range(6):
        loss = engine(**batch(step, 0)).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


@pytest.mark.parametrize(("stage", "offload"), [(0, False), (2, True), (3, False)])
def test_one_process_updates_what_was_left_out_as_several_do(stage: int, offload: bool) -> None:
    """Its weights decay and its momentum goes on, by gradients of zeros."""
    assert alone(stage, offload) == pytest.approx(by_hand(1)[0], abs=2e-5)


class Told(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.seen: list[tuple[Any, Any]] = []

    def forward(self, x: Tensor, progressive_layer_drop: bool = False, pld_theta: float = 0.0) -> Tensor:
        self.seen.append((progressive_layer_drop, pld_theta))
        return (x * self.weight).sum()


class ToldByKeywords(Told):
    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:  # type: ignore[override]
        return super().forward(x, **kwargs)


class ToldThoughItHasBlocks(Told):
    """Reads theta, as DeepSpeed's BERT does, and leaves blocks out itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(4))

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:  # type: ignore[override]
        return super().forward(x, kwargs.get("progressive_layer_drop", False), kwargs.get("pld_theta", 0.0))


def told(kind: type[Told]) -> list[Any]:
    model = kind()
    engine, *_ = initialize(model=model, config=settings(0))
    assert (engine.pld_enabled(), engine.pld_theta(), engine.pld_gamma()) == (True, THETA, GAMMA)
    for _ in range(2):
        engine.backward(engine(torch.ones(2)))
        engine.step()
    assert engine.get_pld_theta() == model.seen[-1][1]
    engine.eval()(torch.ones(2))
    engine.destroy()
    plain, *_ = initialize(model=kind(), config={"train_micro_batch_size_per_gpu": 1})
    assert plain.get_pld_theta() is None
    return model.seen


@pytest.mark.parametrize("kind", [Told, ToldByKeywords, ToldThoughItHasBlocks])
def test_a_model_that_takes_theta_is_told(kind: type[Told]) -> None:
    ((first, second, third),) = run_distributed(told, 1, kind, timeout=30)
    assert first == (True, 1.0)
    assert second == (True, pytest.approx(0.7 * math.exp(-0.5) + 0.3))
    assert third == (False, 0.0)


COLLECTED: ContextVar[list[nn.Module]] = ContextVar("collected")


class Pair(nn.Module):
    """A block that gives hidden states and nothing, as older ones of transformers do, and keeps running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(3)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, None]:
        COLLECTED.get([]).append(self)  # as transformers collects the router logits of experts
        return hidden_states + torch.tanh(self.norm(self.inner(hidden_states))), None


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Pair() for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)[0]
        return x


def pairs() -> None:
    """Blocks give pairs, which is not known before one was computed; and there are steps in which none would be."""
    torch.manual_seed(0)
    model = Pairs()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    section = {"enabled": True, "theta": 0.05, "gamma": 50.0}
    engine, *_ = initialize(model=model, config={**settings(1), "progressive_layer_drop": section})
    for step in range(4):
        x = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(step))
        x.requires_grad_(step == 2)  # as checkpointing adapters asks for it
        plain = Pairs()
        plain.load_state_dict(weights)
        wanted, theta = x, 0.95 * math.exp(-50.0 * step) + 0.05
        shares = [1 - (index + 1) / DEPTH * (1 - theta) for index in range(DEPTH)]
        drawn = [random.Random(f"1234 {step} 1 {index}").random() for index in range(DEPTH)]
        computed = []
        for index, layer in enumerate(plain.layers):
            alone = index == DEPTH - 1 and not computed
            if drawn[index] < shares[index] or alone:
                wanted = wanted + (layer(wanted)[0] - wanted) / shares[index]
                computed.append(index)
        engine.kept["progressive_layer_drop"].forms.clear()  # as in a run that resumes
        COLLECTED.set([])
        found = engine(x)
        assert COLLECTED.get() == [engine.module.layers[index] for index in computed]
        assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-6), step
        for name, value in plain.named_buffers():  # what was left out has left nothing behind
            torch.testing.assert_close(engine.module.get_buffer(name), value, rtol=1e-5, atol=1e-6)
        assert computed
        engine.backward(found.square().mean())  # there is always something that trains
        engine.step()
        weights = {name: value.clone() for name, value in engine.module.state_dict().items()}
    engine.destroy()


def test_blocks_that_give_pairs_and_steps_without_a_block() -> None:
    run_distributed(pairs, 1)


def beside_dropped_tokens(stage: int) -> list[float]:
    """Batches of one process are too short for tokens to be dropped: there hidden states reach a block that is
    left out from the one before, and backward has to come to units in the order of the other process."""
    losses = []
    growth = {"schedule_type": "fixed_linear", "schedule_config": {"require_steps": 100, "seq_per_step": 2}}
    config = {
        **settings(stage),
        **dropped_tokens(random_ltd_schedule={"min_value": 6, "max_value": 12, **growth}),
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = initialize(model=tiny_llama(num_hidden_layers=DEPTH).train(), config=config)
    for step in range(8):
        given = {name: value[:, : (12, 5)[dist.get_rank()]] for name, value in batch(step, dist.get_rank()).items()}
        loss = engine(**given).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


def test_blocks_left_out_beside_dropped_tokens() -> None:
    wanted = run_distributed(beside_dropped_tokens, 2, 0, timeout=30)
    for found, expected in zip(run_distributed(beside_dropped_tokens, 2, 3, timeout=30), wanted, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
