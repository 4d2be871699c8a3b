"""``convert_conv1d_to_linear``: the same numbers, by layers whose weights are transposed."""

from __future__ import annotations

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

from ds_hf.compression.conv1d import convert_conv1d_to_linear


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
