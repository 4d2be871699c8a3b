"""Layers by themselves: masks as torch's pruning chooses them, ranges, noise, bits that are packed."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from ds_hf.compression.compressed import Compressed, QuantAct, pack, unpack
from ds_hf.compression.layers import (
    ColumnParallelLinear_Compress,
    Embedding_Compress,
    LinearLayer_Compress,
    RowParallelLinear_Compress,
    adopt,
    release,
)
from ds_hf.errors import ConfigError


def linear(inputs: int = 16, outputs: int = 24) -> Any:
    torch.manual_seed(0)
    return LinearLayer_Compress(inputs, outputs)


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.9])
def test_masks_of_single_weights_are_torchs(ratio: float) -> None:
    layer = linear(20, 20)
    layer.enable_sparse_pruning(ratio, "l1")
    layer.choose_mask("sparse")
    other = nn.Linear(20, 20)
    other.weight.data.copy_(layer.weight)
    prune.l1_unstructured(other, "weight", amount=1 - ratio)
    assert torch.equal(layer.mask_of("sparse"), other.weight_mask.bool())


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75])
def test_masks_of_rows_are_torchs(ratio: float) -> None:
    layer = linear()
    layer.enable_row_pruning(ratio, "l1")
    layer.choose_mask("row")
    other = nn.Linear(16, 24)
    other.weight.data.copy_(layer.weight)
    prune.ln_structured(other, "weight", amount=1 - ratio, n=1, dim=0)
    assert torch.equal(layer.mask_of("row").view(-1, 1).expand(24, 16), other.weight_mask.bool())


def test_masks_of_channels_are_torchs() -> None:
    torch.manual_seed(0)
    layer: Any = adopt(nn.Conv2d(3, 8, 3))
    layer.enable_channel_pruning(0.5, "l1")
    layer.choose_mask("channel")
    other = nn.Conv2d(3, 8, 3)
    other.weight.data.copy_(layer.weight)
    prune.ln_structured(other, "weight", amount=0.5, n=1, dim=0)
    assert torch.equal(layer.mask_of("channel").view(-1), other.weight_mask[:, 0, 0, 0].bool())
    layer.channel_pruning_enabled = True
    x = torch.randn(2, 3, 5, 5)
    kept = layer.mask_of("channel").view(1, -1, 1, 1)
    plain = nn.functional.conv2d(x, layer.weight, layer.bias)
    torch.testing.assert_close(layer(x), plain * kept)


def test_two_of_four() -> None:
    layer = linear()
    layer.enable_sparse_pruning(0.5, "l1", pattern=(2, 4))
    layer.choose_mask("sparse")
    mask, weight = layer.mask_of("sparse").view(-1, 4), layer.weight.detach().abs().view(-1, 4)
    assert (mask.sum(dim=1) == 2).all()
    assert (weight.masked_fill(~mask, 9).amin(dim=1) > weight.masked_fill(mask, 0).amax(dim=1)).all()


@pytest.mark.parametrize("shape", [(3, 5), (8,), (2, 3, 4, 5)])
def test_masks_are_packed_into_bits(shape: tuple[int, ...]) -> None:
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)) > 0.5
    bits = pack(mask)
    assert bits.dtype is torch.uint8
    assert bits.numel() == (mask.numel() + 7) // 8
    assert torch.equal(unpack(bits, mask.shape), mask)
    assert (pack(torch.ones(shape, dtype=torch.bool)) == 255).all()


def test_an_embedding_reads_quantized_rows() -> None:
    torch.manual_seed(0)
    layer: Any = adopt(nn.Embedding(10, 8, padding_idx=0))
    layer.enable_weight_quantization(3, 3, num_groups=10)
    ids = torch.arange(10)
    assert torch.equal(layer(ids), layer.weight)
    layer.weight_quantization_enabled = True
    assert all(row.unique().numel() <= 8 for row in layer(ids))
    layer(ids).sum().backward()
    assert layer.weight.grad[0].abs().sum() == 0
    assert (layer.weight.grad[1:] == 1).all()


def test_a_running_range_moves_by_its_momentum() -> None:
    act = QuantAct(quant_mode="asymmetric")
    x = torch.tensor([-1.0, 0.0, 3.0])
    act(x, 8)
    assert act.x_min_max.tolist() == [-1.0, 3.0]
    act(2 * x, 8)
    torch.testing.assert_close(act.x_min_max, torch.tensor([-1.05, 3.15]))
    act.eval()
    act(100 * x, 8)
    torch.testing.assert_close(act.x_min_max, torch.tensor([-1.05, 3.15]))
    assert act(100 * x, 2).max() < 3.16


def test_a_range_by_steps_waits_for_the_step() -> None:
    act = QuantAct(by_steps=True)
    x = torch.tensor([-1.0, 0.3, 2.0])
    assert torch.equal(act(x, 2), x)
    act(torch.tensor([-4.0]), 2)
    act.update(act.seen)
    assert act.x_min_max.tolist() == [-4.0, 2.0]
    assert act(x, 2).tolist() == [0.0, 0.0, 2.0]
    act.update(torch.full((2,), -torch.inf))  # of a step without input
    assert act.x_min_max.tolist() == [-4.0, 2.0]


def test_chance_follows_from_the_layer_and_the_step() -> None:
    def weights(name: str, step: int) -> Tensor:
        layer = linear()
        layer.full_name, layer.step = name, step
        layer.enable_weight_quantization(4, 4, stochastic=True)
        layer.weight_quantization_enabled = True
        return layer.compressed()[0].detach()

    first = weights("a", 3)
    assert torch.equal(first, weights("a", 3))
    assert not torch.equal(first, weights("a", 4))
    assert not torch.equal(first, weights("b", 3))


def test_evaluation_rounds_to_the_nearest() -> None:
    by_chance, nearest = linear(), linear()
    by_chance.enable_weight_quantization(4, 4, stochastic=True)
    nearest.enable_weight_quantization(4, 4)
    for layer in (by_chance, nearest):
        layer.weight_quantization_enabled = True
        layer.eval()
    assert torch.equal(by_chance.compressed()[0], nearest.compressed()[0])


def test_each_token_has_its_range() -> None:
    layer = linear()
    layer.enable_activation_quantization(4, "symmetric", "dynamic")
    layer.activation_quantization_enabled = True
    x = torch.randn(2, 3, 16)
    both = layer(torch.cat([x, 100 * x]))
    torch.testing.assert_close(both[:2], layer(x))
    assert all(row.unique().numel() <= 16 for row in layer.quantized_input(x).view(-1, 16))


@pytest.mark.parametrize("calibration", ["dynamic", "static"])
def test_an_expert_without_tokens_computes(calibration: str) -> None:
    layer: Any = adopt(nn.Linear(4, 2))
    layer.enable_activation_quantization(8, range_calibration=calibration, by_steps=True)
    layer.activation_quantization_enabled = True
    made = layer(torch.empty(0, 4, requires_grad=True))
    assert made.shape == (0, 2)
    made.sum().backward()
    assert layer.weight.grad.eq(0).all()


def test_what_was_adopted_is_released() -> None:
    plain = nn.Linear(4, 4)
    before = set(vars(plain))
    layer = adopt(plain, "x")
    layer.enable_weight_quantization(8, 8)
    layer.enable_activation_quantization(8, range_calibration="static")
    layer.enable_sparse_pruning(0.5, "topk")
    layer.enable_head_pruning(0.5, "l1", 2)
    assert isinstance(plain, Compressed)
    release(layer)
    assert type(plain) is nn.Linear
    assert set(vars(plain)) == before
    assert [name for name, _ in plain.named_parameters()] == ["weight", "bias"]
    assert not list(plain.children())


def test_gpt2s_layer_is_found_by_a_pickle() -> None:
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    layer: Any = adopt(Conv1D(6, 4))
    x = torch.randn(2, 4)
    torch.testing.assert_close(layer(x), x @ layer.weight + layer.bias)
    layer.enable_row_pruning(0.5, "l1")
    layer.row_pruning_enabled = True
    layer.choose_mask("row")
    assert (layer(x) == 0).all(dim=0).sum() == 3
    again = pickle.loads(pickle.dumps(layer))
    assert isinstance(again, Conv1D)
    assert torch.equal(again(x), layer(x))


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="which 5 groups do not divide"):
        linear().enable_weight_quantization(8, 8, num_groups=5)
    with pytest.raises(ConfigError, match="around zero"):
        linear().enable_weight_quantization(2, 2, quantization_type="asymmetric")
    with pytest.raises(ConfigError, match="3 heads do not divide"):
        linear().enable_head_pruning(0.5, "l1", 3)
    with pytest.raises(ConfigError, match="LayerNorm, which cannot"):
        adopt(nn.LayerNorm(3), "norm")
    for kind in (ColumnParallelLinear_Compress, RowParallelLinear_Compress):
        with pytest.raises(ConfigError, match="ZeRO"):
            kind(None, 4, 4)
    assert Embedding_Compress(3, 4)(torch.tensor([1])).shape == (1, 4)
