"""``--deepspeed auto`` and blocks: what is worth its start, and what keeps blocks as they are."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from ds_hf.hf import auto_blocks
from ds_hf.hf.auto_activations import Lengths
from ds_hf.hf.auto_blocks import LAUNCHES, LONG, blocks_pay, settle_blocks

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
EQUAL, UNEQUAL = Lengths(64, 64, 64), Lengths(8, 32, 64)


@pytest.mark.parametrize(
    ("seconds", "times", "same", "way"),
    [
        (10 * LAUNCHES * 0.9, 1, True, "capture"),
        (10 * LAUNCHES * 0.9, 1, False, None),
        (10 * LAUNCHES * 1.1, 1, True, None),
        (0.25, int(LONG * 4) + 1, True, "compile"),
        (0.25, int(LONG * 4) + 1, False, "compile"),
        (0.25, int(LONG * 4) - 1, False, None),
        (10 * LAUNCHES * 0.9, int(LONG * 200), False, "compile"),
    ],
)
def test_what_pays(seconds: float, times: int, same: bool, way: str | None) -> None:
    found = blocks_pay(seconds, times, 10, same=same)
    assert (found and found[0]) == way


class Trainer:
    """What is read of a Trainer."""

    def __init__(self, model: Any, **arguments: Any) -> None:
        self.model, self.config = model, dict[str, Any]()
        plugin = SimpleNamespace(hf_ds_config=SimpleNamespace(config=self.config))
        defaults: dict[str, Any] = {
            "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "gradient_checkpointing": False,
            "torch_compile": False, "use_liger_kernel": False, "bf16": False, "fp16": False, "device": "cpu",
        }  # fmt: skip
        self.args = SimpleNamespace(deepspeed_plugin=plugin, **{**defaults, **arguments})


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """On a GPU that computes a small Llama's micro-batch in seconds, where there is a compiler."""
    lines: list[str] = []
    monkeypatch.setattr(sys, "argv", ["train.py"])
    for name in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(auto_blocks, "has_accelerator", lambda: True)
    monkeypatch.setattr(auto_blocks, "_has_compiler", lambda: True)
    monkeypatch.setattr(auto_blocks, "matrix_rate", lambda device, dtype: 1e6)
    monkeypatch.setattr(auto_blocks, "say", lines.append)
    return lines


def test_a_long_run_is_compiled_and_says_so(said: list[str]) -> None:
    trainer = Trainer(LlamaForCausalLM(LlamaConfig(**SIZES)))
    settle_blocks(trainer, 10, UNEQUAL)
    assert (trainer.config, said) == ({}, [])
    settle_blocks(trainer, 100_000, UNEQUAL)
    assert trainer.config == {"ds_hf": {"compile": "blocks"}}
    assert "blocks are compiled, in a run of about" in said[0]
    # in 2 layers 4 matrices of 16 x 16 and 3 of 16 x 32, a head of 16 x 64, 6 operations each; attention: 12 * 2 * 16
    operations = 6 * (2 * (4 * 16 * 16 + 3 * 16 * 32) + 16 * 64) + 12 * 2 * 16 * 32
    hours = 100_000 * 2 * 32 * operations / (auto_blocks.REACHED * 1e6) / 3600
    assert f"about {hours:.1f} hours" in said[0]


def test_small_blocks_of_one_shape_are_captured(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_blocks, "matrix_rate", lambda device, dtype: 1e12)
    trainer = Trainer(LlamaForCausalLM(LlamaConfig(**SIZES)))
    settle_blocks(trainer, 10, UNEQUAL)
    checkpointed = Trainer(trainer.model, gradient_checkpointing=True)
    settle_blocks(checkpointed, 10, EQUAL)
    assert (trainer.config, checkpointed.config) == ({}, {})
    settle_blocks(trainer, 10, EQUAL)
    assert trainer.config == {"ds_hf": {"capture": "blocks"}}


@pytest.mark.parametrize(
    "kept",
    ["no compiler", "no GPU", "named", "off", "compiled", "liger", "experts", "unknown", "no lengths", "no steps"],
)
def test_what_keeps_blocks_as_they_are(kept: str, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = LlamaForCausalLM(LlamaConfig(**SIZES))
    if kept == "no compiler":
        monkeypatch.setattr(auto_blocks, "_has_compiler", lambda: False)
    elif kept == "no GPU":
        monkeypatch.setattr(auto_blocks, "has_accelerator", lambda: False)
    elif kept == "named":
        monkeypatch.setattr(sys, "argv", ["train.py", "--torch_compile", "false"])
    elif kept == "off":
        monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    elif kept == "experts":
        model = MixtralForCausalLM(MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=2))
    elif kept == "unknown":
        model._can_compile_fullgraph = False
    trainer = Trainer(model, torch_compile=kept == "compiled", use_liger_kernel=kept == "liger")
    settle_blocks(trainer, 0 if kept == "no steps" else 100_000, None if kept == "no lengths" else UNEQUAL)
    assert (trainer.config, said) == ({}, [])
