"""Models of transformers at stage 3: built by a script under ``zero.Init``, as Lightning's ``configure_model`` does;
loaded from files that hold two tensors for weights that the configuration ties."""

from __future__ import annotations

import json
from contextlib import nullcontext
from functools import reduce
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.integrations import HfDeepSpeedConfig

from ds_hf.engine.zero.gather import GatheredParameters
from ds_hf.engine.zero.init import Init
from ds_hf.errors import DsHfError
from tests.helpers.distributed import run_distributed

CONFIG = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}


def build(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    if name == "llama":
        return LlamaForCausalLM(LlamaConfig(vocab_size=64, tie_word_embeddings=False, **sizes))
    return BertForSequenceClassification(BertConfig(vocab_size=64, **sizes))


def under_init(name: str) -> dict[str, Tensor]:
    with Init(config_dict_or_path=CONFIG):
        model = build(name)
    assert all(param.numel() == 0 for param in model.parameters())
    with GatheredParameters(list(model.parameters())):
        return {key: param.detach().clone() for key, param in model.named_parameters()}


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_transformers_initialisation_is_kept(name: str) -> None:
    expected = dict(build(name).named_parameters())
    for found in run_distributed(under_init, 2, name):
        assert found.keys() == expected.keys()
        assert not [key for key, value in found.items() if not torch.equal(value, expected[key])]


def save_with_a_head_of_its_own(folder: Path, like: bool) -> dict[str, Tensor]:
    """A model whose configuration ties the head to the embedding, though the file has both: alike or not."""
    model = build("llama")
    if like:
        model.lm_head.weight.data.copy_(model.model.embed_tokens.weight.data)  # type: ignore[union-attr, operator]
    model.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**written, "tie_word_embeddings": True}))
    plain = cast(PreTrainedModel, LlamaForCausalLM.from_pretrained(folder))
    return {name: param.detach() for name, param in plain.named_parameters()}


def load_sharded(folder: str) -> dict[str, Tensor]:
    kept = HfDeepSpeedConfig(CONFIG)
    model = cast(PreTrainedModel, LlamaForCausalLM.from_pretrained(folder))
    del kept
    with GatheredParameters(list(model.parameters())):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


@pytest.mark.parametrize("like", [False, True])
def test_a_head_whose_values_differ_from_the_embedding_is_not_tied_to_it(tmp_path: Path, like: bool) -> None:
    expected = save_with_a_head_of_its_own(tmp_path, like)
    assert ("lm_head.weight" in expected) is not like
    for found in run_distributed(load_sharded, 2, str(tmp_path)):
        assert found.keys() == expected.keys()
        assert not [name for name, value in found.items() if not torch.equal(value, expected[name])]


def save_bare(folder: str) -> dict[str, Tensor]:
    """Whole weights, which a save inside of ``GatheredParameters`` has; outside nothing is written."""
    with Init(config_dict_or_path=CONFIG):
        model = build("llama")
    refused = pytest.raises(DsHfError, match=r"would write an empty model\.embed_tokens\.weight")
    with nullcontext() if dist.get_rank() else refused:  # others write nothing
        model.save_pretrained(f"{folder}/bare")
    assert not list(Path(folder).glob("bare/*.safetensors"))
    with GatheredParameters(list(model.parameters())):
        model.save_pretrained(f"{folder}/{dist.get_rank()}")
        return {name: param.detach().clone() for name, param in model.named_parameters()}


def test_a_bare_model_at_rest_is_not_written_empty(tmp_path: Path) -> None:
    expected = run_distributed(save_bare, 2, str(tmp_path))[0]
    found = cast(PreTrainedModel, LlamaForCausalLM.from_pretrained(tmp_path / "0"))
    assert not [name for name, param in found.named_parameters() if not torch.equal(param, expected[name])]


def save_again(folders: list[str]) -> None:
    for folder in folders:
        kept = HfDeepSpeedConfig(CONFIG)
        model = cast(PreTrainedModel, BertForSequenceClassification.from_pretrained(folder))
        del kept
        with GatheredParameters(list(model.parameters())):
            model.save_pretrained(f"{folder}-saved", is_main_process=dist.get_rank() == 0)


def test_a_model_is_saved_with_the_names_that_its_file_had(tmp_path: Path) -> None:
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    folders = [tmp_path / "new", tmp_path / "old"]
    for folder in folders:
        build("bert").save_pretrained(folder)
    weights = load_file(folders[1] / "model.safetensors")
    for new, name in [(key, reduce(lambda key, pair: key.replace(*pair), old.items(), key)) for key in weights]:
        weights[name] = weights.pop(new)
    save_file(weights, folders[1] / "model.safetensors", {"format": "pt"})
    run_distributed(save_again, 2, [str(folder) for folder in folders])
    for folder in folders:
        before, after = (load_file(f"{path}/model.safetensors") for path in (folder, f"{folder}-saved"))
        assert after.keys() == before.keys()
        assert not [name for name in after if not torch.equal(after[name], before[name])]
