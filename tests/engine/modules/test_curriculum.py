"""A curriculum by length: numbers are those of plain torch on batches that were cut by hand."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import Trainer

from ds_hf import initialize
from ds_hf.errors import ConfigError, DsHfError
from tests.compat.common import largest_difference, run_user_code
from tests.compat.trainer_code import config as trainer_config
from tests.compat.trainer_code import fit, tiny_llama
from tests.helpers.distributed import run_distributed
from tests.helpers.logs import Lines

SCHEDULE = {"schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 4, "difficulty_step": 2}}
LENGTHS = [6, 8, 10, 12, 12, 12]  # of steps from 1
LEGACY = {"curriculum_learning": {"enabled": True, "min_difficulty": 4, "max_difficulty": 12, **SCHEDULE}}


def today(name: str = "seqlen", **changes: Any) -> dict[str, Any]:
    metric = {"min_difficulty": 4, "max_difficulty": 12, **SCHEDULE, **changes}
    inner = {"enabled": True, "curriculum_metrics": {name: metric}}
    return {"data_efficiency": {"enabled": True, "data_sampling": {"enabled": True, "curriculum_learning": inner}}}


def settings(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
        **more,
    }


def batches(steps: int = 6, world: int = 2) -> list[list[list[dict[str, Tensor]]]]:
    """By step, micro-batch and process: full rows of 16 tokens."""
    generator = torch.Generator().manual_seed(5)

    def one() -> dict[str, Tensor]:
        tokens = torch.randint(1, 128, (2, 16), generator=generator)
        return {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}

    return [[[one() for _ in range(world)] for _ in range(2)] for _ in range(steps)]


def by_hand() -> list[float]:
    """The mean loss of each step, in one process, and in the end a loss in evaluation."""
    model = tiny_llama().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for length, step in zip(LENGTHS, batches(), strict=True):
        found = [model(**{k: v[:, :length] for k, v in row.items()}).loss for micro in step for row in micro]
        loss = torch.stack(found).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        losses.append(model.eval()(**batches()[0][0][0]).loss.item())
    return losses


def train(engine: Any, first: int, last: int) -> list[float]:
    losses = []
    for step in batches()[first:last]:
        found = torch.zeros((), device=engine.device)
        for micro in step:
            loss = engine(**micro[dist.get_rank() % len(micro)]).loss
            engine.backward(loss)
            engine.step()
            found += loss.detach() / 2
        dist.all_reduce(found)
        losses.append(found.item() / dist.get_world_size())
    return losses


def stages(folder: str) -> dict[int, list[float]]:
    found = {}
    for stage in (0, 1, 2, 3):
        section = LEGACY if stage % 2 else today()
        engine, *_ = initialize(model=tiny_llama().train(), config=settings(stage, **section))
        losses = train(engine, 0, 2)
        engine.save_checkpoint(folder, tag=f"stage{stage}")
        engine.destroy()
        engine, *_ = initialize(model=tiny_llama().train(), config=settings(stage, **section))
        engine.load_checkpoint(folder, tag=f"stage{stage}")
        losses += train(engine, 2, 6)
        with torch.no_grad():
            losses.append(engine.eval()(**batches()[0][0][0]).loss.item())
        engine.destroy()
        found[stage] = losses
    return found


def test_two_processes_at_every_stage_resumed_in_the_middle(tmp_path: Path) -> None:
    wanted = by_hand()
    for found in run_distributed(stages, 2, str(tmp_path), timeout=60):
        for losses in found.values():
            assert losses == pytest.approx(wanted, abs=2e-5)


class ByHand(Trainer):
    """Cuts what it takes from its loader."""

    def get_batch_samples(self, epoch_iterator: Any, *args: Any, **kwargs: Any) -> Any:
        length = LENGTHS[self.state.global_step]
        cut = ({name: value[:, :length] for name, value in batch.items()} for batch in epoch_iterator)
        return super().get_batch_samples(cut, *args, **kwargs)


def trainers(folder: str) -> Any:
    more = {"gradient_accumulation_steps": 2, "train_sampling_strategy": "sequential"}
    plain = fit(folder, trainer_class=ByHand, **more)
    return plain, {stage: fit(folder, trainer_config(stage, **LEGACY), **more) for stage in (0, 3)}


def test_the_trainer_counts_tokens_after_the_cut(tmp_path: Path) -> None:
    for plain, by_stage in run_user_code(trainers, str(tmp_path)):
        for found in by_stage.values():
            assert largest_difference(found, plain) <= 1e-5


class Own(nn.Module):
    """Takes the length itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.seen: list[int] = []

    def forward(self, tokens: Tensor, curriculum_seqlen: int = 0) -> Tensor:
        self.seen.append(curriculum_seqlen)
        return tokens.float().mean() * self.weight


class OwnByKeywords(Own):
    """As DeepSpeed's models do; what it trains on are no tokens."""

    def forward(self, values: Tensor, **kwargs: Any) -> Tensor:  # type: ignore[override]
        return super().forward(values, kwargs.get("curriculum_seqlen", 0))


class PassesOn(Own):
    def forward(self, values: Tensor, **kwargs: Any) -> Tensor:  # type: ignore[override]
        return super().forward(values, **kwargs)


def one_process(folder: str) -> dict[str, Any]:
    tokens = torch.ones(2, 16, dtype=torch.long)
    found: dict[str, Any] = {}
    reads = OwnByKeywords()
    engine, *_ = initialize(model=reads, config=settings(0, **LEGACY))
    engine(torch.ones(2, 16))
    found["reads"] = reads.seen
    engine.destroy()
    engine, *_ = initialize(model=PassesOn(), config=settings(0, **LEGACY))
    with pytest.raises(DsHfError, match="found no tokens to cut in a call of PassesOn"):
        engine(torch.ones(2, 16))
    engine.destroy()

    model = Own()
    engine, *_ = initialize(model=model, config=settings(0, **today(schedule_type="custom", schedule_config={})))
    engine.set_custom_curriculum_learning_schedule({"seqlen": lambda step: 3 + step})
    for _ in range(4):
        engine.backward(engine(tokens))
        engine.step()
    found["told"] = model.seen, engine.curriculum_scheduler_legacy.get_current_difficulty()
    found["names"] = engine.curriculum_learning_enabled(), engine.curriculum_enabled_legacy()
    engine.destroy()

    engine, *_ = initialize(model=tiny_llama().train(), config=settings(0, **LEGACY))
    found["positional"] = engine(tokens).logits.shape[1]
    found["cut"] = engine.cut_to_curriculum({"input_ids": tokens})["input_ids"].shape[1]
    labels = torch.where(torch.arange(16) < 8, -100, tokens)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    assert engine(input_ids=tokens, labels=labels).loss.isnan()
    later = {  # than the first batch that was cut
        "no label": {"input_ids": tokens},
        "no tokens": {"hidden": torch.ones(2, 16)},
        "left": {"input_ids": tokens, "attention_mask": (torch.arange(16) > 2).expand(2, 16)},
        "packed": {"input_ids": tokens, "position_ids": torch.arange(16).expand(2, 16) % 9},
        "flat": {"input_ids": tokens, "cu_seq_lens_q": torch.tensor([0, 9, 32])},
    }
    for name, batch in later.items():
        with pytest.raises(DsHfError) as caught:
            engine(**batch)
        found[name] = str(caught.value)
    engine.destroy()

    engine, *_ = initialize(model=tiny_llama().train(), config=settings(0, **LEGACY))
    logging.getLogger("ds_hf").addHandler(lines := Lines(logging.WARNING))
    for _ in range(2):  # the last micro-batch of all
        assert engine(input_ids=tokens, labels=labels).loss.isnan()
        with pytest.raises(DsHfError, match="left no label in a micro-batch"):
            engine.save_checkpoint(folder)
    engine(input_ids=tokens, labels=labels)
    engine.destroy()
    assert [text for text in lines.texts if "left no label" in text]
    return found


def test_models_that_cut_themselves_and_batches_that_cannot_be_cut(tmp_path: Path) -> None:
    (found,) = run_distributed(one_process, 1, str(tmp_path), timeout=30)
    assert found["told"] == ([4, 4, 5, 5], 5)
    assert found["reads"] == [6]
    assert found["names"] == (True, False)
    assert found["positional"] == found["cut"] == 6
    assert "left no label in a micro-batch" in found["no label"]
    assert "found no tokens to cut in a call of LlamaForCausalLM" in found["no tokens"]
    assert "padding on the left" in found["left"]
    assert "begin again inside a row" in found["packed"]
    assert "cu_seq_lens_q: the documents" in found["flat"]


def refused() -> list[str]:
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(T5Config(d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8, vocab_size=32))
    found = []
    for given in (settings(0, **LEGACY), settings(0, **LEGACY, **today())):
        with pytest.raises(ConfigError) as caught:
            initialize(model=model, config=given)
        found.append(str(caught.value))
    return found


def test_models_with_two_sequences_and_files_with_two_curricula_are_refused() -> None:
    (found,) = run_distributed(refused, 1, timeout=30)
    assert "sequences of an encoder and of a decoder" in found[0]
    assert "data_efficiency has a curriculum of lengths as well" in found[1]
