"""Attention heads under Muon: their rows are matrices of their own, found by names and shapes, at every stage."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    CLIPVisionConfig,
    FalconConfig,
    FalconForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

import ds_hf
from ds_hf.engine.optim.muon import Muon
from ds_hf.engine.optim.muon_groups import mark_matrices, muon_of_json
from ds_hf.engine.optim.muon_heads import head_rows
from ds_hf.errors import ConfigError
from tests.helpers.distributed import run_distributed


@pytest.mark.parametrize("method", ["gram", "standard"])
def test_heads_are_matrices_of_their_own(method: str) -> None:
    torch.manual_seed(0)
    whole = nn.Parameter(torch.randn(12, 6))
    whole.muon_num_heads = 3  # type: ignore[attr-defined]
    heads = [nn.Parameter(rows.detach().clone()) for rows in whole.chunk(3)]
    plain = nn.Parameter(whole.detach().clone())
    settings: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.2, "ns_method": method}
    optimizers = [Muon([whole], **settings), Muon(heads, **settings), Muon([plain], **settings)]
    for _ in range(3):
        grad = torch.randn(12, 6) * torch.tensor([1.0, 10.0, 100.0]).repeat_interleave(4)[:, None]
        whole.grad, plain.grad = grad.clone(), grad.clone()
        for head, rows in zip(heads, grad.chunk(3), strict=True):
            head.grad = rows.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(whole.detach(), torch.cat([head.detach() for head in heads]), atol=2e-6, rtol=0)
    assert (whole - plain).abs().max() > 0.05


def test_marks_that_do_not_fit() -> None:
    param = nn.Parameter(torch.randn(10, 4))
    param.muon_num_heads = 3  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"rows of a parameter of shape \(10, 4\) are no 3 heads"):
        Muon([param])
    one, other = nn.Parameter(torch.randn(8, 4)), nn.Parameter(torch.randn(8, 4))
    one.muon_num_heads = 2  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="groups of their own"):
        Muon([one, other])
    optimizer = muon_of_json([one, other])  # the file's makes them
    assert [(group["name"], group.get("head_rows")) for group in optimizer.param_groups] == [
        ("muon-params", None),
        ("muon-heads-of-4-params", 4),
    ]


class Attention(nn.Module):
    def __init__(self, **shapes: tuple[int, int]) -> None:
        super().__init__()
        for name, (rows, columns) in shapes.items():
            setattr(self, name, nn.Linear(columns, rows, bias=False))


class LinearAttention(Attention):
    pass


def marked(config: dict[str, Any], kind: type[nn.Module] = Attention, **shapes: tuple[int, int]) -> dict[str, Any]:
    model = nn.Module()
    model.config = SimpleNamespace(**config)  # type: ignore[assignment]
    model.attention = kind(**shapes)
    mark_matrices(model, heads=True)
    return {name: head_rows(module.weight) for name, module in model.attention.named_children()}


GROUPED = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
LATENT = {"hidden_size": 16, "num_attention_heads": 2, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 6}


def test_what_is_marked() -> None:
    found = marked(GROUPED, q_proj=(16, 16), k_proj=(8, 16), v_proj=(8, 16), o_proj=(16, 16), gate=(16, 16))
    assert found == {"q_proj": 4, "k_proj": 4, "v_proj": 4, "o_proj": None, "gate": None}
    assert marked({**GROUPED, "head_dim": None}, qkv_proj=(32, 16)) == {"qkv_proj": 4}
    assert marked(LATENT, q_b_proj=(12, 8), kv_b_proj=(20, 8), kv_a_proj=(8, 16)) == {
        "q_b_proj": 6,
        "kv_b_proj": 10,
        "kv_a_proj": None,
    }
    assert marked(GROUPED, q_proj=(16, 16), k_proj=(16, 16)) == {"q_proj": 4, "k_proj": None}  # not the number of rows


def test_a_key_that_would_do_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="the key would do nothing"):
        marked(GROUPED, LinearAttention, q_proj=(16, 16))
    with pytest.raises(ConfigError, match="the key would do nothing"):
        marked({"hidden_size": 16}, q_proj=(16, 16))


def llava() -> nn.Module:
    """Its towers are equally wide, and have other heads."""
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32}
    vision = CLIPVisionConfig(num_attention_heads=2, image_size=28, patch_size=14, **shape)
    text = LlamaConfig(vocab_size=64, num_attention_heads=4, num_key_value_heads=2, **shape)
    return LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text))


def bart() -> nn.Module:
    return BartForConditionalGeneration(
        BartConfig(
            vocab_size=32,
            d_model=16,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=4,
            encoder_ffn_dim=16,
            decoder_ffn_dim=16,
            max_position_embeddings=32,
        )
    )


def falcon() -> nn.Module:
    """All heads share keys and values, which its configuration does not say as a number of heads."""
    return FalconForCausalLM(FalconConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=4))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (llava, {"vision_tower.encoder.layers.0.self_attn": 16, "language_model.layers.0.self_attn": 8}),
        (bart, {"encoder.layers.0.self_attn": 8, "decoder.layers.0.self_attn": 4, "decoder.layers.0.encoder_attn": 4}),
        (falcon, {"h.0.self_attention": 4}),
    ],
)
def test_towers_and_decoders_have_heads_of_their_own(make: Callable[[], nn.Module], expected: dict[str, int]) -> None:
    model = make()
    mark_matrices(model, heads=True)
    names = ("q_proj", "k_proj", "v_proj", "query_key_value")
    found: dict[str, set[int | None]] = {}
    for name, module in model.named_modules():
        owner, _, last = name.rpartition(".")
        if last in names:
            found.setdefault(owner, set()).add(head_rows(module.weight))  # type: ignore[arg-type]
    assert len(found) == len(expected)
    for owner, rows in expected.items():
        assert [each for name, each in found.items() if name.endswith(owner)] == [{rows}]


def test_what_does_not_train_is_not_found() -> None:
    model = llava().requires_grad_(False)
    with pytest.raises(ConfigError, match="the key would do nothing"):
        mark_matrices(model, heads=True)


def test_matrices_that_stay_whole_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr("ds_hf.engine.optim.muon_heads.warn_once", told.append)
    marked(GROUPED, q_proj=(16, 16), k_proj=(16, 16))
    assert len(told) == 1
    assert told[0].startswith("per_head_muon: 1 matrices (such as attention.k_proj) stay whole")


def losses(stage: int, per_head: bool, accumulation: int = 1) -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, intermediate_size=24, num_hidden_layers=2, **shape))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "Muon", "params": {"lr": 0.02, "per_head_muon": per_head}},
    }
    engine = ds_hf.initialize(model=model, config=config)[0]
    found = []
    for step in range(4 * accumulation):
        tokens = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(step))
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        found.append(float(loss))
    names = [group["name"] for group in engine.optimizer.param_groups]
    engine.destroy()
    return found, names


def test_every_stage_trains_as_one_process() -> None:
    plain, names = losses(0, True)
    assert names == ["muon-params", "muon-heads-of-4-params", "adam-params"]
    whole, _ = losses(0, False)
    assert max(abs(a - b) for a, b in zip(plain, whole, strict=True)) > 1e-4
    for stage in (1, 3):
        for found, _ in run_distributed(losses, 2, stage, True):
            assert found == pytest.approx(plain, abs=2e-3)
    assert losses(2, True, 2)[0][-1] == pytest.approx(losses(0, True, 2)[0][-1], abs=1e-5)
