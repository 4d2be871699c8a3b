"""Models of transformers that a script builds under ``zero.Init`` itself, as Lightning's ``configure_model`` does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from ds_hf.engine.zero.gather import GatheredParameters
from ds_hf.engine.zero.init import Init
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
