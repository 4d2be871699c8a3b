"""Packed documents: logits and gradients are those of each document in a row of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from ds_hf import initialize
from ds_hf.engine.modules.documents import bounds_of
from ds_hf.errors import DsHfError
from ds_hf.log import forget_said
from tests.compat.trainer_code import tiny_llama
from tests.compression.common import logged
from tests.helpers.distributed import run_distributed

LENGTHS = [5, 1, 9, 7]
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "head_dim": 8,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "decoder_sparse_step": 100,
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "conv"], "block_multiple_of": 8},
}


def net(name: str) -> Any:
    torch.manual_seed(0)
    if name == "llama":
        return tiny_llama().train()
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SMALL, **MODELS[name])).train()


def documents() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(1, 60, (1, length), generator=generator) for length in LENGTHS]


def packed() -> dict[str, Tensor]:
    places = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    return {"input_ids": torch.cat(documents(), 1), "position_ids": places}


def numbers(call: Any, model: Any) -> tuple[Tensor, Tensor]:
    """Logits of all tokens, and the gradient of the embedding of their sum of squares."""
    logits = call()
    loss = logits.float().square().mean()
    return logits.detach(), torch.autograd.grad(loss, model.get_input_embeddings().weight)[0]


def compare(name: str, compiled: bool = False) -> float:
    settings = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 0}}
    plain = net(name)
    wanted = numbers(lambda: torch.cat([plain(input_ids=each).logits for each in documents()], 1), plain)
    model = net(name)
    engine, *_ = initialize(model=model, config=settings)
    if compiled:
        engine.compile(backend="aot_eager")
        numbers(lambda: engine(input_ids=packed()["input_ids"]).logits, model)  # one that is not packed comes first
    found = numbers(lambda: engine(**packed()).logits, model)
    whole = engine(input_ids=packed()["input_ids"]).logits
    assert float((whole - found[0]).abs().max()) > 1e-4  # without bounds what a document leaves behind is seen
    engine.destroy()
    return max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))


def one_process() -> dict[str, Any]:
    return {name: compare(name) for name in (*MODELS, "llama")}


def test_each_document_is_computed_as_if_it_were_alone() -> None:
    (found,) = run_distributed(one_process, 1, timeout=60)
    assert all(difference < 2e-6 for difference in found.values()), found


@pytest.mark.slow
def test_compiled_blocks_keep_documents_apart() -> None:
    (found,) = run_distributed(compare, 1, "qwen3_next", True, timeout=100)
    assert found < 2e-6


def stages() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for stage in (2, 3):
        model = net("qwen3_next")
        model.gradient_checkpointing_enable({"use_reentrant": False})
        config = {"train_batch_size": 2, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": stage}}
        engine, *_ = initialize(model=model, config=config)
        losses = []
        for _ in range(3):
            loss = engine(**packed(), labels=packed()["input_ids"]).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        found[f"stage {stage}"] = losses
        first, second = (engine(**packed()).logits.sum() for _ in range(2))
        with pytest.raises(DsHfError, match="several calls of the model before their backward"):
            engine.backward(first + second)
        engine.destroy()
    return found


def test_two_processes_with_checkpointing_at_stages_2_and_3() -> None:
    torch.manual_seed(0)
    plain = net("qwen3_next")
    optimizer = torch.optim.AdamW(plain.parameters())
    wanted = []
    for _ in range(3):
        logits = torch.cat([plain(input_ids=each).logits for each in documents()], 1)
        labels = packed()["input_ids"]
        loss = torch.nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        wanted.append(loss.item())
    for found in run_distributed(stages, 2, timeout=60):
        for losses in found.values():
            assert losses == pytest.approx(wanted, abs=2e-5)


def test_bounds_of_batches() -> None:
    places = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 0, 0]])
    tokens = torch.ones_like(places)
    found = bounds_of({"input_ids": tokens, "position_ids": places})
    assert found is not None
    assert found.shape == (2, 6)
    first = [[0, 1, 2, -1], [3, 4, -1, -1], [5, -1, -1, -1]]
    assert found.rows.tolist() == [*first, [6, 7, 8, 9], [10, -1, -1, -1], [11, -1, -1, -1]]
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    padded = bounds_of({"input_ids": tokens, "position_ids": places, "attention_mask": mask})
    assert padded is not None
    assert padded.rows[3].tolist() == [6, 7, 8, 9, 10, 11]
    assert bounds_of({"input_ids": tokens, "position_ids": torch.arange(6).expand(2, 6)}) is None
    ends = bounds_of({"input_ids": tokens[:1], "cu_seq_lens_q": torch.tensor([0, 4, 6], dtype=torch.int32)})
    assert ends is not None
    assert ends.rows.tolist() == [[0, 1, 2, 3], [4, 5, -1, -1]]


def evaluated_and_masked() -> dict[str, Any]:
    settings = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 0}}
    found: dict[str, Any] = {}
    for name in (*MODELS, "llama"):
        plain, model = net(name).eval(), net(name)
        engine, *_ = initialize(model=model, config=settings)
        engine.eval()
        forget_said()
        with torch.no_grad(), logged() as told:
            wanted = torch.cat([plain(input_ids=each).logits for each in documents()], 1)
            found[name] = float((engine(**packed()).logits - wanted).abs().max())
            alone = engine(input_ids=documents()[3], position_ids=torch.arange(LENGTHS[3])[None])
            found[f"{name} keeps"] = alone.past_key_values is not None
            padded = {"input_ids": torch.ones(1, 4, dtype=torch.long), "position_ids": torch.tensor([[1, 1, 0, 1]])}
            engine(**padded, attention_mask=torch.tensor([[0, 0, 1, 1]]))
            found[f"{name} padded"] = list(told)
        engine.destroy()
        engine, *_ = initialize(model=net(name), config=settings)
        with logged() as told:
            engine(**packed(), attention_mask=torch.ones_like(packed()["input_ids"]))
        found[f"{name} masked"] = [line for line in told if "Leave attention_mask out" in line]
        engine.destroy()
    return found


def test_documents_are_apart_in_evaluation_and_a_mask_beside_them_is_told() -> None:
    (found,) = run_distributed(evaluated_and_masked, 1, timeout=60)
    for name in (*MODELS, "llama"):
        assert found[name] < 2e-6
        assert found[f"{name} keeps"]  # one text, which may go on
        assert not any("Leave attention_mask out" in line for line in found[f"{name} padded"])
        assert len(found[f"{name} masked"]) == 1
