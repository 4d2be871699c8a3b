"""Which layers of a model of transformers can be in few bits, and what a token costs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MixtralConfig,
    T5Config,
)

from ds_hf.checkpoint.pretrained import read_pretrained
from ds_hf.errors import CheckpointError
from ds_hf.hf.few_bits import cost_of, linear_layers, load_plain, model_config, token_ids

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def _llama(**more: object) -> LlamaConfig:
    return LlamaConfig(**SIZES, num_key_value_heads=2, **more)


def test_linear_layers_of_the_backbone() -> None:
    found = linear_layers(_llama(architectures=["LlamaForCausalLM"])).linear
    assert found.pop("lm_head") == "the head"
    assert len(found) == 14
    assert set(found.values()) == {""}
    found = linear_layers(_llama(architectures=["LlamaForSequenceClassification"])).linear
    assert found["score"] == "the head"
    config = BertConfig(**SIZES, architectures=["BertForMaskedLM"])
    heads = {name for name, why in linear_layers(config).linear.items() if why}
    assert heads == {"cls.predictions.transform.dense", "cls.predictions.decoder"}


def test_routers_stay() -> None:
    config = MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=2, architectures=["MixtralForCausalLM"])
    found = linear_layers(config).linear
    assert not [name for name in found if "gate" in name and not found[name]]
    assert "model.layers.0.self_attn.q_proj" in found


def test_layers_of_another_kind_are_none() -> None:
    config = GPT2Config(n_layer=1, n_embd=32, n_head=2, architectures=["GPT2LMHeadModel"])
    assert linear_layers(config).linear == {"lm_head": "the head"}


def test_models_that_transformers_cannot_load_packed_are_refused() -> None:
    """As it initializes a T5 it writes into weights of layers that have none then."""
    config = T5Config(vocab_size=32, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2)
    config.architectures = ["T5ForConditionalGeneration"]
    with pytest.raises(CheckpointError, match="transformers cannot load a T5ForConditionalGeneration whose weights"):
        linear_layers(config)
    assert linear_layers(config, packed=False).linear["encoder.block.0.layer.0.SelfAttention.q"] == ""
    found = linear_layers(config, [r"SelfAttention", "EncDecAttention", r"\.w[io]$"]).linear
    assert set(found.values()) == {"excluded", "the head"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("plain")
    torch.manual_seed(0)
    LlamaForCausalLM(_llama(tie_word_embeddings=True)).to(torch.bfloat16).save_pretrained(place)
    return place


def test_cost_of_a_token(folder: Path) -> None:
    source = read_pretrained(folder)
    model = load_plain(source, model_config(source, None), None)
    theirs = LlamaForCausalLM.from_pretrained(folder).eval()
    state = model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in theirs.state_dict().items())
    text = torch.arange(700) % 64
    found = cost_of(model, text)
    assert 0 < found.milliseconds < 10_000
    with torch.no_grad():
        parts = [(theirs(part[None], labels=part[None]).loss, len(part) - 1) for part in (text[:512], text[512:])]
    expected = sum(float(loss) * count for loss, count in parts) / sum(count for _, count in parts)
    assert found.loss == pytest.approx(expected, rel=1e-6)
    assert cost_of(model, None).loss is None


def test_what_is_told_before_anything_is_written(folder: Path, tmp_path: Path) -> None:
    source = read_pretrained(folder)
    with pytest.raises(CheckpointError, match="has no tokenizer for --text"):
        token_ids(folder, folder / "config.json")
    torch.manual_seed(0)
    BertForMaskedLM(BertConfig(**SIZES)).save_pretrained(tmp_path / "bert")
    bert = read_pretrained(tmp_path / "bert")
    with pytest.raises(CheckpointError, match="BertForMaskedLM does not continue texts"):
        cost_of(load_plain(bert, model_config(bert, None), None), None)
    with pytest.raises(CheckpointError, match="does not continue texts"):
        cost_of(LlamaForSequenceClassification(_llama()), None)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}')
    with pytest.raises(CheckpointError, match="the weights are in few bits already"):
        model_config(source, tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "own"}')
    with pytest.raises(CheckpointError, match="transformers knows no such model"):
        model_config(source, tmp_path)
    alone = tmp_path / "alone" / "weights"
    alone.mkdir(parents=True)
    (alone / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="Convert with --model FOLDER"):
        model_config(read_pretrained(alone), None)
    config = T5Config(d_model=32, num_heads=3, d_kv=0, architectures=["LlamaForCausalLM"])
    with pytest.raises(CheckpointError, match=r"transformers cannot build the model of config.json"):
        linear_layers(config)
