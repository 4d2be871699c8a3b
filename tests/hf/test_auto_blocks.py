"""``--deepspeed auto`` and blocks: what is worth its start, and what keeps blocks as they are."""

from __future__ import annotations

import sys
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from ds_hf.hf import auto_blocks
from ds_hf.hf.auto_activations import Lengths
from ds_hf.hf.auto_blocks import LAUNCHES, LONG, RECORDED, blocks_pay, settle_computation

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
EQUAL, UNEQUAL = Lengths(64, 64, 64), Lengths(8, 32, 64)


@pytest.mark.parametrize(
    ("seconds", "times", "same", "pads", "way"),
    [
        (10 * LAUNCHES * 0.9, 1, True, True, "capture"),
        (10 * LAUNCHES * 0.9, 1, False, False, None),
        (10 * LAUNCHES * 1.1, 1, True, True, None),
        (10 * LAUNCHES * 0.9, int(RECORDED / LAUNCHES) - 99, False, True, "compile"),  # a tenth of ten blocks
        (10 * LAUNCHES * 0.9, int(RECORDED / LAUNCHES) + 99, False, True, "capture"),
        (0.25, int(LONG * 4) + 1, True, True, "compile"),
        (0.25, int(LONG * 4) + 1, False, True, "compile"),
        (0.25, int(LONG * 4) - 1, False, True, None),
        (10 * LAUNCHES * 0.9, int(LONG * 200), False, False, "compile"),
    ],
)
def test_what_pays(seconds: float, times: int, same: bool, pads: bool, way: str | None) -> None:
    found = blocks_pay(seconds, times, 10, same=same, pads=pads)
    assert (found and found[0]) == way


class Trainer:
    """What is read of a Trainer. ``lengths`` of its samples, ``kept``: what is found of activations."""

    def __init__(self, model: Any, lengths: Lengths | None, kept: bool = True, **arguments: Any) -> None:
        self.model, self.train_dataset, self.kept, self.config = model, lengths, kept, dict[str, Any]()
        plugin = SimpleNamespace(hf_ds_config=SimpleNamespace(config=self.config))
        defaults: dict[str, Any] = {
            "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "gradient_checkpointing": False,
            "torch_compile": False, "use_liger_kernel": False, "bf16": False, "fp16": False, "device": "cpu",
        }  # fmt: skip
        self.args = SimpleNamespace(deepspeed_plugin=plugin, **{**defaults, **arguments})


def use_liger(model: Any) -> None:
    """As Liger does with a model that is there: another ``forward`` of the norms."""

    def forward(module: Any, hidden: torch.Tensor) -> torch.Tensor:
        raise AssertionError("is not run")

    forward.__module__ = "liger_kernel.transformers.rms_norm"
    for layer in model.model.layers:
        layer.input_layernorm.forward = MethodType(forward, layer.input_layernorm)


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
    monkeypatch.setattr(auto_blocks, "settle_activations", lambda trainer, lengths, reason: trainer.kept)
    monkeypatch.setattr(auto_blocks, "lengths_of", lambda dataset: (dataset, "of a test"))
    return lines


def test_a_long_run_is_compiled_and_says_so(said: list[str]) -> None:
    trainer = Trainer(LlamaForCausalLM(LlamaConfig(**SIZES)), UNEQUAL)
    settle_computation(trainer, 10)
    assert (trainer.config, said) == ({}, [])
    settle_computation(trainer, 100_000)
    assert trainer.config == {"ds_hf": {"compile": "blocks"}}
    assert "blocks are compiled, in a run of about" in said[0]
    # in 2 layers 4 matrices of 16 x 16 and 3 of 16 x 32, a head of 16 x 64, 6 operations each; attention: 12 * 2 * 16
    operations = 6 * (2 * (4 * 16 * 16 + 3 * 16 * 32) + 16 * 64) + 12 * 2 * 16 * 32
    hours = 100_000 * 2 * 32 * operations / (auto_blocks.REACHED * 1e6) / 3600
    assert f"about {hours:.1f} hours" in said[0]


def test_small_blocks_of_one_shape_are_captured(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_blocks, "matrix_rate", lambda device, dtype: 1e12)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    others = [
        Trainer(model, UNEQUAL), Trainer(model, EQUAL, gradient_checkpointing=True), Trainer(model, EQUAL, kept=False),
        Trainer(model, EQUAL, parallelism_config=SimpleNamespace(tp_size=2, sp_size=1)),
    ]  # fmt: skip
    for other in others:
        settle_computation(other, 10)
        assert other.config == {}
    trainer = Trainer(model, EQUAL)
    settle_computation(trainer, 10)
    assert trainer.config == {"ds_hf": {"capture": "blocks"}}


@pytest.mark.parametrize("model", ["Llama", "a part that sees later positions", "checkpointing"])
def test_small_blocks_of_many_lengths_are_captured_with_padding(
    model: str, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto_blocks, "matrix_rate", lambda device, dtype: 1e12)
    llama: Any = LlamaForCausalLM(LlamaConfig(**SIZES))
    if model.startswith("a part"):
        llama.model.layers[0].self_attn.is_causal = False
    trainer = Trainer(llama, Lengths(8, 300, 515), gradient_checkpointing=model == "checkpointing")
    settle_computation(trainer, 50_000)
    padded = {"capture": "blocks", "capture_pad_to_multiple_of": 72}  # 515 / 8, in eights
    assert trainer.config.get("ds_hf", {}) == (padded if model == "Llama" else {})
    assert [line for line in said if "padded to multiples of 72" in line] == said


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
    elif kept == "liger":
        use_liger(model)
    trainer = Trainer(model, None if kept == "no lengths" else UNEQUAL, torch_compile=kept == "compiled")
    settle_computation(trainer, 0 if kept == "no steps" else 100_000)
    assert (trainer.config, said) == ({}, [])


@pytest.mark.parametrize(
    ("case", "taken", "way"),
    [
        ("small blocks of one shape", False, {"ds_hf": {"capture": "blocks"}}),
        ("a long run", True, {}),
        ("no room for activations", True, {}),
        ("other lengths, and few steps", True, {}),
        ("named", False, {}),
        ("not installed", False, {}),
        ("unknown to Liger", False, {"ds_hf": {"compile": "blocks"}}),
    ],
)
def test_kernels_of_liger_are_taken_where_blocks_are_not_captured(
    case: str, taken: bool, way: dict[str, Any], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, bool]] = []

    def apply(model: Any, kernels: dict[str, bool]) -> None:
        given.append(kernels)
        if case != "unknown to Liger":
            use_liger(model)

    monkeypatch.setattr(auto_blocks, "find_spec", lambda name: None if case == "not installed" else True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("transformers.integrations.liger.apply_liger_kernel", apply)
    if case not in ("a long run", "unknown to Liger"):
        monkeypatch.setattr(auto_blocks, "matrix_rate", lambda device, dtype: 1e12)
    if case == "named":
        monkeypatch.setattr(sys, "argv", ["train.py", "--use_liger_kernel", "False"])
    lengths = UNEQUAL if case in ("other lengths, and few steps", "named", "not installed") else EQUAL
    trainer = Trainer(
        LlamaForCausalLM(LlamaConfig(**SIZES)),
        lengths,
        case != "no room for activations",
        liger_kernel_config={"rope": False},
    )
    settle_computation(trainer, 100 if lengths is UNEQUAL else 100_000)
    assert trainer.config == way
    assert any("Liger's kernels are taken" in line for line in said) == taken
    asked = taken or case == "unknown to Liger"
    assert given == [{"cross_entropy": False, "fused_linear_cross_entropy": False, "rope": False}] * asked
