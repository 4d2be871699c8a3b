"""Stacked experts in blocks compute with what the blocks stand for, whatever computes with them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_hf.config.types.parallel import ExpertParallelSection
from ds_hf.engine.modules.quantized.format import WeightFormat
from ds_hf.engine.modules.quantized.layers import is_quantized, quantize_layers, values_of_blocks
from ds_hf.engine.modules.quantized.stacks import quantize_experts
from ds_hf.errors import ConfigError
from tests.engine.parallel.experts.test_adapters import distance, gradients, made

FORMATS = [WeightFormat(4), WeightFormat(8, 128, symmetric=False), WeightFormat(8, 64, dim=0)]


def quantized(model: nn.Module, form: WeightFormat, dtype: torch.dtype | None = None) -> list[str]:
    return quantize_experts(model, lambda name, module: form, ExpertParallelSection(), dtype)


def rounded(model: nn.Module, blocks: nn.Module) -> nn.Module:
    """``model`` with the values that the blocks stand for."""
    readable = values_of_blocks(blocks)
    for param, other in zip(model.parameters(), blocks.parameters(), strict=True):
        param.data.copy_(readable(other, other))
    return model


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("kind", "dtype"), [("gpt_oss", torch.float32), ("mixtral", torch.float64)])
def test_experts_in_blocks_are_experts_with_rounded_weights(kind: str, dtype: torch.dtype, form: WeightFormat) -> None:
    blocks, plain = made(kind, dtype, ours=False), made(kind, dtype, ours=False)
    done = quantized(blocks, form)
    assert len(done) == 4
    plain = rounded(plain, blocks)
    for active in ("default", ["default", "other"]):
        assert distance(gradients(blocks, active), gradients(plain, active)) < (
            3e-6 if dtype is torch.float32 else 1e-12
        )
    with torch.no_grad():  # one token: fewer routes than experts
        one = torch.tensor([[5]])
        torch.testing.assert_close(blocks(input_ids=one).logits, plain(input_ids=one).logits)
    again = copy.deepcopy(blocks)
    assert distance(gradients(again, "other"), gradients(blocks, "other")) == 0
    state = blocks.state_dict()
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    again.load_state_dict(state)
    assert quantized(again, form) == []


class Mixed(nn.Module):
    """All experts for all tokens, one product: of a kind that no plan describes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(3, 16, 64)), nn.Parameter(torch.randn(3, 64, 16))
        self.table = nn.Parameter(torch.randn(1, 5, 16))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(torch.relu(torch.bmm(x, self.up)), self.down)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.experts, self.conv = nn.Linear(16, 16), Mixed(), nn.Conv1d(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = self.experts(self.first(x).expand(3, -1, -1)).sum(0)
        return total


def test_experts_of_a_module_that_nothing_describes() -> None:
    torch.manual_seed(0)
    model = Block()
    model.experts.requires_grad_(False)
    plain = copy.deepcopy(model)
    model.experts.table = plain.experts.table = None  # type: ignore[assignment]
    assert quantized(model, WeightFormat(4)) == ["experts.up", "experts.down"]
    assert is_quantized(model.experts)
    rounded(plain, model)
    x, own = torch.randn(1, 7, 16), {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(0 if tensor.untyped_storage().data_ptr() in own else tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        found = model(x)
    assert max(kept) < 3 * 16 * 64
    found.sum().backward()
    plain(x).sum().backward()
    torch.testing.assert_close(found, plain(x))
    torch.testing.assert_close(model.first.weight.grad, plain.first.weight.grad)


def test_adapters_are_never_quantized() -> None:
    model = made("mixtral", torch.float32, ours=False)
    done = quantize_layers(model, lambda name, module: WeightFormat(8), frozen_only=True)
    assert done
    assert not [name for name in done if "lora_" in name]


def test_adapters_need_products_of_ours() -> None:
    model = made("mixtral", torch.float32, ours=False)
    for module in model.modules():
        if hasattr(module, "gate_up_proj") and "gate_up_proj" in module._parameters:
            module.forward = module.forward  # replaced by hand
    with pytest.raises(ConfigError, match=r"has adapters, with which ds_hf has to compute then: the forward of"):
        quantized(model, WeightFormat(4))


def test_meta_tensors_have_the_same_shapes() -> None:
    for form in (*FORMATS, WeightFormat(4, 64, symmetric=False)):
        values = torch.randn(6, 100)
        packed, shape = form.pack(values), (6, 100)
        empty = form.pack(values.to("meta"))
        assert (empty.shape, empty.dtype) == (packed.shape, packed.dtype)
        found: Any = form.unpack(empty, shape, torch.float32)
        assert found.shape == form.unpack(packed, shape, torch.float32).shape
