"""Layers divided over two processes by ``init_inference``: the tokens of one process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.distributed import DistributedFailure, run_distributed
from tests.helpers.generating import GREEDY, left_padded, small_model

NAMES = ("llama", "qwen3", "mistral", "gpt2", "t5")


def divided(names: Sequence[str]) -> list[Any]:
    """Tokens of the models, greedy and drawn, and how many elements this process has of them."""
    from ds_hf import init_inference

    found = []
    for name in names:
        model = small_model(name)
        whole = sum(p.numel() for p in model.parameters())
        engine = init_inference(model, dtype="fp32", tensor_parallel={"tp_size": 2}, replace_with_kernel_inject=True)
        tokens = engine.generate(**left_padded(), **GREEDY)
        drawn = engine.generate(**left_padded(), **{**GREEDY, "do_sample": True, "max_new_tokens": 6})
        part = sum(p.numel() for p in model.parameters())
        found.append((name, tokens.tolist(), drawn.tolist(), part / whole))
    return found


def by_policy(folder: str) -> list[Any]:
    """OPT-like rules given as a policy; Llama's blocks, so that the tokens are known."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    from ds_hf import init_inference

    model = small_model("llama")
    policy = {LlamaDecoderLayer: ("self_attn.o_proj", "mlp.down_proj")}
    engine = init_inference(model, dtype="fp32", mp_size=2, injection_policy=policy)
    return [engine.generate(**left_padded(), **GREEDY).tolist(), model.lm_head.weight.shape[0]]


def odd(folder: str) -> None:
    from ds_hf import init_inference

    made = small_model("llama").config
    made.num_attention_heads, made.num_key_value_heads = 6, 3
    init_inference(type(small_model("llama"))(made), dtype="fp32", tensor_parallel={"tp_size": 2})


def loaded(folder: str) -> list[Any]:
    """Weights of a folder into a model without values, each process its part."""
    from ds_hf import init_inference

    with torch.device("meta"):
        model = small_model("llama")
    engine = init_inference(model, dtype="fp32", tensor_parallel={"tp_size": 2}, checkpoint=folder)
    return [engine.generate(**left_padded(), **GREEDY).tolist(), model.model.layers[0].mlp.up_proj.weight.shape[0]]


def divided_in_host_memory(name: str) -> tuple[list[Any], int]:
    """Tokens with layers cut, its parts divided once more by ZeRO; elements that rest on the device."""
    from ds_hf import init_inference

    model = small_model(name)
    host = {"stage": 3, "offload_param": {"device": "cpu"}}
    engine = init_inference(model, dtype="fp32", tensor_parallel={"tp_size": 2}, zero=host)
    tokens = engine.generate(**left_padded(), **GREEDY).tolist()
    return tokens, sum(param.numel() for param in model.parameters())


@pytest.mark.parametrize("names", [NAMES[:1], pytest.param(NAMES[1:], marks=pytest.mark.slow)], ids="-".join)
def test_tokens_over_two_processes(names: Sequence[str]) -> None:
    first, second = run_distributed(divided, 2, names, timeout=240)
    assert first == second
    for name, tokens, _, share in first:
        assert tokens == small_model(name).generate(**left_padded(), **GREEDY).tolist(), name
        assert share < 0.8, name


@pytest.mark.slow
@pytest.mark.parametrize(("name", "processes"), [("llama", 2), ("llama", 4), ("gpt2", 2), ("t5", 2)])
def test_layers_divided_and_in_host_memory(name: str, processes: int) -> None:
    expected = small_model(name).generate(**left_padded(), **GREEDY).tolist()
    whole = sum(param.numel() for param in small_model(name).parameters())
    for tokens, here in run_distributed(divided_in_host_memory, processes, name, timeout=60):
        assert tokens == expected
        assert here < whole / 4


def test_policies(tmp_path: Path) -> None:
    expected = small_model("llama").generate(**left_padded(), **GREEDY).tolist()
    assert run_distributed(by_policy, 2, str(tmp_path), timeout=120) == [[expected, 128]] * 2


def test_heads_that_do_not_divide(tmp_path: Path) -> None:
    with pytest.raises(DistributedFailure, match=r"3 heads \(num_key_value_heads\), which 2 does not divide"):
        run_distributed(odd, 2, str(tmp_path), timeout=120)


def test_slices_of_a_checkpoint(tmp_path: Path) -> None:
    model = small_model("llama")
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]) > 10
    expected = model.generate(**left_padded(), **GREEDY).tolist()
    assert run_distributed(loaded, 2, str(tmp_path), timeout=120) == [[expected, 64]] * 2


def test_processes_that_do_not_divide() -> None:
    from ds_hf import init_inference
    from ds_hf.errors import ConfigError

    with pytest.raises(ConfigError, match="tp_size is 2 and there are 1 processes"):
        init_inference(small_model("llama"), tensor_parallel={"tp_size": 2})
