"""Models by name, by description and as modules; nothing of them is loaded or changed."""

from __future__ import annotations

import json
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch

from ds_hf.log import forget_said
from ds_hf.memory import UnpredictableError, Workload
from ds_hf.memory.models import build, example_inputs, without_values
from tests.helpers.models import TinyLM

TINY = "llama:hidden=64,layers=2,heads=4,kv_heads=2,intermediate=128,vocab=1k"


def test_a_description() -> None:
    model = build(TINY, Workload())
    assert {param.device.type for param in model.parameters()} == {"meta"}
    assert model.training
    assert model.config.vocab_size == 1024
    assert not model.config.use_cache
    per_layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64
    assert sum(p.numel() for p in model.parameters()) == 2 * 1024 * 64 + 2 * per_layer + 64


def test_a_description_may_be_longer_than_a_file_name() -> None:
    assert build(TINY + ",hidden=32" * 30, Workload()).config.hidden_size == 32


def test_a_folder(tmp_path: Path) -> None:
    from transformers import BertConfig

    config = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
    config.architectures = ["BertForSequenceClassification"]
    config.save_pretrained(tmp_path)
    model = build(tmp_path, Workload())
    assert type(model).__name__ == "BertForSequenceClassification"
    inputs = example_inputs(model, Workload(micro_batch=3, seq_len=7))
    assert inputs["input_ids"].shape == (3, 7)
    assert inputs["labels"].shape == (3,)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("no/such/model", "cannot find the model 'no/such/model'"),
        ("lama:hidden=64", "does not know the model type 'lama'"),
        ("llama:hiden=64", "no 'hiden'"),
        ("llama:hidden", "'hidden' is not of the form"),
        ("llama:hidden=65,heads=4", "llama:hidden=65"),
        ("qwen3_moe:experts=4", r"to 8 experts \(num_experts_per_tok\), and there are 4: add num_experts_per_tok=4"),
        ("deepseek_v3:experts=4", "to 8 experts"),
        ("mixtral:num_experts_per_tok=0", r"to 0 experts \(num_experts_per_tok\), and there are 8: .* from 1 on"),
        ("llama:hidden=32,layers=-2", "'layers=-2': sizes are whole numbers from 1 on"),
        ("gpt2:n_embd=32,heads=0", "'heads=0': sizes are"),
        ("llama:hidden=32,layers=1,heads=2,head_dim=0,vocab=64", "cannot build"),
    ],
)
def test_bad_names(source: str, text: str) -> None:
    with pytest.raises(UnpredictableError, match=text):
        build(source, Workload())


SMALL = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"hidden_size": "32"}, "its config.json is no model's: .*'hidden_size' expected int, got str"),
        ({"num_attention_heads": 5}, "its config.json is no model's: .*32.* is not a multiple of .*5"),
        ({"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 0}, "to 0 experts .* there are 4"),
    ],
)
def test_bad_folders(tmp_path: Path, more: dict[str, Any], text: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, **more}))
    with pytest.raises(UnpredictableError, match=text):
        build(tmp_path, Workload())


@pytest.mark.parametrize(
    ("named", "why"), [("MyForCausalLM", "has no class of that name"), ("LlamaModel", "computes no loss"), (None, "")]
)
def test_another_class_than_the_folder_names(
    tmp_path: Path, named: str | None, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    forget_said()
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "architectures": [named]} if named else SMALL))
    assert type(build(tmp_path, Workload())).__name__ == "LlamaForCausalLM"
    said = [text for text in caplog.messages if "LlamaForCausalLM is predicted instead" in text]
    assert [f"names {named}" in text and why in text for text in said] == [True] * bool(named)


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "deepseek_v2", "ernie4_5_moe"])
def test_experts_by_the_short_name(kind: str) -> None:
    """Each family has a name of its own for their number."""
    model = build(f"{kind}:hidden=16,layers=2,heads=2,kv_heads=2,intermediate=16,vocab=32,experts=6", Workload())
    assert any(param.dim() == 3 and len(param) == 6 for param in model.parameters())


@pytest.mark.parametrize("name", ["micro_batch", "seq_len"])
@pytest.mark.parametrize("value", [0, -1, 1.5])
def test_bad_shapes(name: str, value: float) -> None:
    with pytest.raises(UnpredictableError, match=name):
        Workload(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name",
    [
        "gpt2:n_embd=32,n_layer=1,n_head=2,n_positions=128",
        "roberta:hidden=32,layers=1,heads=2,intermediate=32,positions=130",
    ],
)
def test_a_sequence_longer_than_the_positions(name: str) -> None:
    model = build(name, Workload())
    with pytest.raises(UnpredictableError, match="129 tokens is more than the model's 128"):
        example_inputs(model, Workload(seq_len=129))


def test_a_module_stays_as_it_is() -> None:
    model = TinyLM()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    copy = without_values(model)
    assert {tensor.device.type for tensor in (*copy.parameters(), *copy.buffers())} == {"meta"}
    assert copy.head.weight is copy.embedding.weight, "tied in the copy too"
    assert all(torch.equal(values[name], value) for name, value in model.state_dict().items())
    assert {param.device.type for param in model.parameters()} == {"cpu"}


def test_a_module_of_ones_own_needs_a_batch() -> None:
    with pytest.raises(UnpredictableError, match="Workload"):
        example_inputs(without_values(TinyLM()), Workload())
    inputs = example_inputs(TinyLM(), Workload(micro_batch=5, inputs={"tokens": torch.zeros(2, 9), "flag": True}))
    assert inputs["tokens"].shape == (5, 9)
    assert inputs["tokens"].is_meta
    assert inputs["flag"] is True


def test_a_forward_that_was_put_on_a_model_is_not_run_with_its_weights() -> None:
    model = TinyLM()
    original = model.forward
    model.forward = MethodType(lambda self, tokens: original(tokens), model)  # type: ignore[method-assign]
    copied = without_values(model)
    assert copied(torch.zeros(2, 8, dtype=torch.long, device="meta")).device.type == "meta"
    assert model.forward.__func__ is not TinyLM.forward
