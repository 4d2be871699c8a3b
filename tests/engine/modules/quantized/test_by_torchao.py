"""Weights as torchao's tensors where it is installed; blocks for what it does not take."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ds_hf.inference.engine as inference
from ds_hf import init_inference
from ds_hf.engine.modules.quantized.by_torchao import quantize_by_torchao
from ds_hf.engine.modules.quantized.layers import is_quantized, tied_weights
from ds_hf.engine.zero.packed import is_packed
from ds_hf.errors import ConfigError
from ds_hf.inference.decode import _addresses
from tests.helpers.generating import GREEDY, left_padded, small_model


def modules_of(model: Any) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if module._parameters.get("weight") is not None}


@pytest.mark.slow
def test_int8_beside_blocks_and_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchao")
    monkeypatch.setattr(inference, "_is_gpu", lambda device: True)
    inputs = left_padded()
    exact = small_model("llama", dtype=torch.bfloat16)(**inputs).logits.float()
    model = small_model("llama", dtype=torch.bfloat16)
    engine = init_inference(model, dtype="int8", replace_with_kernel_inject=True)
    layer, embedding = model.model.layers[0].mlp.up_proj, model.model.embed_tokens
    assert type(layer.weight.data).__name__ == "Int8Tensor"
    assert is_quantized(embedding)  # torchao has no embeddings
    assert not is_quantized(layer)
    found = engine(**inputs).logits.float()
    assert 0 < (found - exact).norm() / exact.norm() < 0.1
    expected = model.generate(**inputs, **GREEDY)
    assert torch.equal(engine.generate(**inputs, **GREEDY), expected)
    assert engine.decoder is not None
    assert engine.decoder.last.way == "static"
    tensors, _ = _addresses(model)
    assert all(tensors)  # also of the numbers behind a wrapper: a graph reads those
    with pytest.raises(ConfigError, match="is quantized already, and would be quantized again"):
        init_inference(model, dtype="int8")


@pytest.mark.slow
def test_tied_weights_and_layers_of_other_classes_are_not_torchaos(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchao")
    monkeypatch.setattr(inference, "_is_gpu", lambda device: True)
    model = small_model("gpt2", dtype=torch.bfloat16)
    init_inference(model, dtype="int8")
    assert model.lm_head.weight is model.transformer.wte.weight
    assert not is_packed(model.lm_head.weight)
    assert is_quantized(model.transformer.h[0].mlp.c_fc)  # Conv1D


def test_where_torchao_cannot_the_blocks_do(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Its int4 asks for another library, or for a device that is not there; older versions lack arguments."""

    def refuses(module: Any, config: Any, filter_fn: Any) -> None:
        raise ImportError("Requires mslk >= 1.0.0")

    plain, model = (
        small_model("llama", dtype=torch.bfloat16) for _ in range(2)
    )  # transformers imports torchao where it is installed
    stand_in = SimpleNamespace(quantize_=refuses, Int4WeightOnlyConfig=dict)
    monkeypatch.setitem(sys.modules, "torchao.quantization", stand_in)
    monkeypatch.setattr(inference, "_is_gpu", lambda device: True)
    monkeypatch.setattr(inference, "has_torchao", lambda: True)
    init_inference(model, dtype="int4")
    assert all(is_quantized(module) for name, module in modules_of(model).items() if "norm" not in name)
    assert "torchao does not quantize to 4 bits here, ds_hf's blocks are used: Requires mslk >= 1.0.0" in caplog.text
    assert quantize_by_torchao(plain, 8, tied_weights(plain)) == []  # no Int8WeightOnlyConfig there
    assert not any(is_packed(param) for param in plain.parameters())
