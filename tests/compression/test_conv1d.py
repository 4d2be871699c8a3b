"""``convert_conv1d_to_linear``: the same numbers, by layers whose weights are transposed."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

from ds_hf import initialize
from ds_hf.compression import init_compression, redundancy_clean
from ds_hf.compression.conv1d import convert_conv1d_to_linear
from tests.compression.common import config, method


def test_layers_are_linear_and_compute_the_same() -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=16)).eval()
    ids = torch.arange(8)[None]
    with torch.no_grad():
        expected = model(ids).logits
        assert convert_conv1d_to_linear(model, Conv1D) is model
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-5, atol=1e-6)
    assert not any(isinstance(module, Conv1D) for module in model.modules())
    layer = model.transformer.h[1].mlp.c_fc
    assert type(layer) is nn.Linear
    assert not layer.training
    assert layer.weight.shape == (64, 16)


def test_in_the_end_transformers_loads_it(tmp_path: Path) -> None:
    """DeepSpeed's GPT-2 example: convert, initialise, train, clean, save."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=16))
    convert_conv1d_to_linear(model, Conv1D)
    section = {
        "weight_quantization": method({"target_bits": 4}, ["mlp", "attn"], quantize_groups=16, schedule_offset=0),
        "row_pruning": method({"dense_ratio": 0.5}, ["mlp.c_fc"], [["mlp.c_proj"]], schedule_offset=1),
    }
    file, ids = config(section, 1), torch.arange(8)[None]
    engine = initialize(model=init_compression(model, file), config=file)[0]
    for _ in range(3):
        engine.backward(engine(ids, labels=ids).loss)
        engine.step()
    engine.eval()
    with torch.no_grad():
        expected = engine(ids).logits.clone()
        model = redundancy_clean(engine, file).eval()
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-5, atol=1e-6)
        model.save_pretrained(tmp_path)
        loaded = GPT2LMHeadModel.from_pretrained(tmp_path).eval()
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert loaded.config.n_inner == 32
