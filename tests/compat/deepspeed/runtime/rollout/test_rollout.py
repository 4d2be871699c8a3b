"""Rollouts: DeepSpeed's names, and responses that are those of ``generate``."""

from __future__ import annotations

from typing import Any

import deepspeed
import pytest
import torch
import torch.nn.functional as F
from deepspeed.runtime.rollout import (
    HybridEngineRollout,
    ResponseTokenBatch,
    RolloutBatch,
    RolloutConfig,
    RolloutRequest,
    SamplingConfig,
    build_rollout,
    generalized_jsd_loss,
)
from deepspeed.runtime.rollout.continuous_batching import ContinuousBatchRequest, ContinuousBatchScheduler
from deepspeed.runtime.rollout.hybrid_engine_rollout import HybridEngineRolloutConfig
from torch import Tensor

from tests.engine.modules.generation.common import EOS, engine_of, llama, plain_copy, tokens, train
from tests.helpers.distributed import run_distributed

NEW = 12


class Tokenizer:
    pad_token_id = 0
    eos_token_id = (EOS, 7, 9, 11, 13, 15, 17, 19, 21)  # some row meets one


def prompts() -> RolloutRequest:
    """Of several lengths, on this rank."""
    ids = tokens(4, rows=5, length=6)
    for row, padding in enumerate((0, 2, 4, 1, 3)):
        ids[row, :padding] = 0
    return RolloutRequest(ids, (ids != 0).long())


def response_of(plain: Any, request: RolloutRequest, row: int) -> list[int]:
    """Greedy, of one prompt by itself, with the token that ends it."""
    ids = request.prompt_ids[row][request.prompt_attention_mask[row].bool()][None]
    ends = list(Tokenizer.eos_token_id)
    out = plain.generate(input_ids=ids, max_new_tokens=NEW, do_sample=False, eos_token_id=ends, pad_token_id=0)
    found: list[int] = out[0, ids.shape[1] :].tolist()
    return found


def rolled_out(stage: int) -> None:
    model = llama()
    model.lm_head.weight.data[0] = 0  # it never says the padding, which masks take for padding
    engine = engine_of(model, stage)
    train(engine, 1)
    plain = plain_copy(engine, llama())
    request = prompts()
    expected = [response_of(plain, request, row) for row in range(5)]
    rollout = build_rollout(RolloutConfig(), engine, Tokenizer())
    assert isinstance(rollout, HybridEngineRollout)
    batch = rollout.generate(request, SamplingConfig(NEW, temperature=0.0))
    assert batch.input_ids.shape == (5, 6 + NEW)
    check(batch, request, expected)
    profiled = HybridEngineRollout(engine, Tokenizer(), HybridEngineRolloutConfig(enable_profiling=True))
    continuous = profiled.generate(request, SamplingConfig(NEW, temperature=0.0, continuous_batch_size=2))
    assert continuous.seq_len == 6 + max(map(len, expected))
    check(continuous, request, expected)
    stats, profile = profiled.get_last_continuous_stats(), profiled.get_last_profile()
    assert stats is not None
    assert stats["decode_steps"] < sum(len(row) - 1 for row in expected)
    assert profile is not None
    assert profile["num_generated_tokens"] == sum(map(len, expected))
    assert engine.module.training
    sampled = rollout.generate(request, SamplingConfig(NEW, temperature=0.9, top_p=0.9, n_samples_per_prompt=3))
    assert sampled.batch_size == 15
    assert torch.equal(sampled.input_ids[::3, :6], request.prompt_ids)
    assert len({tuple(row) for row in sampled.input_ids.tolist()}) > 5
    assert rollout.sync_weights(1) is None
    rollout.shutdown()


def check(batch: RolloutBatch, request: RolloutRequest, expected: list[list[int]]) -> None:
    assert batch.response_start_idx.tolist() == [6] * 5
    assert torch.equal(batch.input_ids[:, :6], request.prompt_ids)
    assert torch.equal(batch.attention_mask[:, :6], request.prompt_attention_mask)
    for row, response in enumerate(expected):
        said = batch.input_ids[row, 6:]
        assert said[: len(response)].tolist() == response
        assert not said[len(response) :].any()
        assert batch.attention_mask[row, 6:].tolist() == [1] * len(response) + [0] * (len(said) - len(response))


def test_responses_are_those_of_generate() -> None:
    run_distributed(rolled_out, 2, 3)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2])
def test_responses_at_other_stages(stage: int) -> None:
    run_distributed(rolled_out, 2, stage)


def refused() -> None:
    engine = engine_of(llama(), 0)
    rollout = build_rollout(RolloutConfig(), engine, Tokenizer())
    wrong = {
        "greedy": SamplingConfig(4, continuous_batch_size=2),
        "one sample": SamplingConfig(4, 0.0, n_samples_per_prompt=2, continuous_batch_size=2),
        "max_new_tokens": SamplingConfig(0, 0.0, continuous_batch_size=2),
        "max_batch_size": SamplingConfig(4, 0.0, continuous_batch_size=0),
        "position": SamplingConfig(400, 0.0, continuous_batch_size=2),
    }
    for what, sampling in wrong.items():
        with pytest.raises(ValueError, match=what):
            rollout.generate(prompts(), sampling)


def test_continuous_batches_refuse_as_deepspeed_does() -> None:
    run_distributed(refused, 1)
    with pytest.raises(ValueError, match="Unknown rollout engine"):
        build_rollout(RolloutConfig(engine="vllm"))
    with pytest.raises(ValueError, match="needs both"):
        build_rollout(RolloutConfig())
    with pytest.raises(ValueError, match="must be 2-D"):
        RolloutRequest(torch.zeros(8), torch.zeros(8))
    with pytest.raises(ValueError, match="1-D of length 2"):
        RolloutBatch(torch.zeros(2, 4), torch.zeros(2, 4), torch.zeros(1))


def test_the_scheduler_keeps_the_order_of_rows() -> None:
    scheduler = ContinuousBatchScheduler(2, 3)
    for key in "abc":
        scheduler.submit(ContinuousBatchRequest(key))
    with pytest.raises(ValueError, match="duplicate"):
        scheduler.submit(ContinuousBatchRequest("c"))
    first = scheduler.schedule()
    assert (first.active_ids, first.keep_slots, first.admitted_slots) == (("a", "b"), (), (0, 1))
    second = scheduler.advance(["a"])
    assert (second.active_ids, second.keep_slots, second.retired) == (("b", "c"), (1,), ("a",))
    assert second.admitted_slots == (1,)
    assert [request.request_id for request in scheduler.active] == ["b", "c"]
    third = scheduler.advance()
    assert third.active_ids == ("b", "c")
    assert scheduler.advance().retired == ("b",)
    with pytest.raises(ValueError, match="not active"):
        scheduler.schedule(["a"])


def jsd(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Token by token, from the definition."""
    p, q = teacher.softmax(-1).double(), student.softmax(-1).double()
    mixture = beta * p + (1 - beta) * q
    if beta in (0.0, 1.0):
        first, second = (p, q) if beta == 0.0 else (q, p)
        return (first * (first / second).log()).sum(-1)
    return beta * (p * (p / mixture).log()).sum(-1) + (1 - beta) * (q * (q / mixture).log()).sum(-1)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_divergence_is_that_of_its_definition(beta: float) -> None:
    generator = torch.Generator().manual_seed(1)
    student, teacher = torch.randn(2, 2, 5, 11, generator=generator).unbind(0)
    mask = torch.tensor([[1, 1, 0, 1, 0], [0, 1, 1, 1, 1]])
    found = generalized_jsd_loss(student, teacher, mask, beta=beta, temperature=2.0)
    expected = (jsd(student / 2, teacher / 2, beta) * mask).sum()
    assert found.loss_sum.item() == pytest.approx(expected.item(), rel=1e-5)
    assert found.valid_token_count.item() == 7
    assert found.loss.item() == pytest.approx(expected.item() / 7, rel=1e-5)
    few = generalized_jsd_loss(student, teacher, mask, beta=beta, teacher_top_k=11)
    whole = generalized_jsd_loss(student, teacher, mask, beta=beta)
    assert few.loss.item() == pytest.approx(whole.loss.item(), rel=1e-5)
    with pytest.raises(ValueError, match="beta"):
        generalized_jsd_loss(student, teacher, mask, beta=1.5)


def test_targets_are_the_next_tokens_of_responses() -> None:
    ids = torch.arange(10).view(2, 5)
    rollout = RolloutBatch(ids, torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]]), torch.tensor([3, 2]))
    batch = ResponseTokenBatch.from_rollout(rollout)
    assert batch.target_ids.tolist() == [[1, 2, 3, 4], [6, 7, 8, 9]]
    assert batch.response_mask.tolist() == [[False, False, True, True], [False, True, True, False]]
    logits = F.one_hot(ids, 12).float()
    assert batch.select_causal_logits(logits).shape == (2, 4, 12)
    assert deepspeed.runtime.rollout.RolloutConfig is RolloutConfig
