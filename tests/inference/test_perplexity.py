"""Weights of 8 and 4 bits on real text: the perplexity of a model that is trained here on Python's standard library."""

from __future__ import annotations

import math
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_hf import init_inference

LENGTH, BATCH, STEPS = 128, 16, 150


def text() -> torch.Tensor:
    """Bytes of the standard library, ``[n]`` int64."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()


def trained(tokens: torch.Tensor) -> Any:
    """A small Llama of bytes after some hundred steps."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=LENGTH, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=STEPS)
    for _ in range(STEPS):
        starts = torch.randint(0, len(tokens) - LENGTH, (BATCH,))
        batch = torch.stack([tokens[start : start + LENGTH] for start in starts])
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model.eval()


@torch.no_grad()
def perplexity(model: Any, tokens: torch.Tensor) -> float:
    losses = [model(input_ids=batch, labels=batch).loss.float().item() for batch in tokens.view(-1, 8, LENGTH)]
    return math.exp(sum(losses) / len(losses))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.minutes(5)
def test_perplexity_of_8_and_4_bits() -> None:
    tokens = text()
    held_out, rest = tokens[: 8 * 8 * LENGTH], tokens[8 * 8 * LENGTH :]
    model = trained(rest)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    found = {}
    for name, options in {
        "bf16": {"dtype": "bf16"},
        "int8": {"dtype": "int8"},
        "int4": {"dtype": "int4"},
        "int4 asymmetric": {"dtype": "int4", "quant": {"weight": {"q_type": "asymmetric"}}},
        "int4 in host memory": {"dtype": "int4", "zero": {"stage": 3, "offload_param": {"device": "cpu"}}},
    }.items():
        copied = type(model)(model.config)
        copied.load_state_dict(state)
        engine = init_inference(copied, **options)
        found[name] = perplexity(engine, held_out)
        engine.destroy()
    print(found)
    assert 2 < found["bf16"] < 20  # it has learnt: a byte of chance is 256
    assert found["int8"] == pytest.approx(found["bf16"], rel=0.01)
    for name in ("int4", "int4 asymmetric", "int4 in host memory"):
        assert found[name] == pytest.approx(found["bf16"], rel=0.03), name
