"""LoRA of stacked experts without the sum of weight and adapter, against PEFT's own way: outputs and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_hf.config.types.parallel import ExpertParallelSection
from ds_hf.engine.parallel.experts import adapters
from ds_hf.engine.parallel.experts.divide import divide_experts
from tests.engine.parallel.experts.test_compute import ALONE, IDS
from tests.helpers.experts import build, loss_of, planned


def made(kind: str, dtype: torch.dtype, *, ours: bool) -> Any:
    """A model with adapters of two ranks, none of which a grouped product takes as it is, and two scales."""
    from peft import LoraConfig, get_peft_model

    options: dict[str, Any] = {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    model: Any = build(kind, experts="eager" if dtype is torch.float64 else "grouped_mm").to(dtype)
    model = get_peft_model(model, LoraConfig(r=3, lora_alpha=5, **options), autocast_adapter_dtype=False)
    model.add_adapter("other", LoraConfig(r=5, use_rslora=True, **options), autocast_adapter_dtype=False)
    generator = torch.Generator().manual_seed(3)
    for name, param in model.named_parameters():
        if "lora_" in name:
            param.data.copy_(torch.randn(param.shape, generator=generator) * 0.1)
    if ours:
        divide_experts(model, ALONE, ExpertParallelSection(enabled=True))
    return model


def gradients(model: Any, active: Any) -> dict[str, Tensor]:
    model.base_model.set_adapter(active)
    loss = loss_of(model, IDS)
    loss.backward()
    found = {name: param.grad.double() for name, param in model.named_parameters() if param.grad is not None}
    model.zero_grad()
    return {"loss": loss.detach().double(), **found}


def distance(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert found.keys() == wanted.keys()
    return max(float((found[name] - value).norm() / value.norm()) for name, value in wanted.items())


@pytest.mark.parametrize("kind", planned(("qwen3_moe", "gpt_oss", "aria")))
def test_two_products_more_give_what_peft_gives(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, ours, exact = (
        made(kind, dtype, ours=o) for dtype, o in ((torch.float32, 0), (torch.float32, 1), (torch.float64, 0))
    )
    monkeypatch.setattr(adapters, "whole_delta", None)
    for active in ("default", "other", ["default", "other"]):
        wanted = gradients(exact, active)
        assert distance(gradients(ours, active), wanted) < max(2 * distance(gradients(plain, active), wanted), 2e-6)
    with plain.disable_adapter(), ours.disable_adapter():
        torch.testing.assert_close(loss_of(ours, IDS), loss_of(plain, IDS), rtol=1e-6, atol=0)
    before = loss_of(ours, IDS)
    ours.merge_adapter()
    torch.testing.assert_close(loss_of(ours, IDS), before, rtol=1e-5, atol=0)
    assert not any(module.__dict__.get("_ds_adapters") for module in ours.modules())


def test_16_bits_are_as_near_as_peft_is() -> None:
    plain, ours, exact = (
        made("mixtral", d, ours=o) for d, o in ((torch.bfloat16, 0), (torch.bfloat16, 1), (torch.float64, 0))
    )
    wanted = gradients(exact, "other")
    assert distance(gradients(ours, "other"), wanted) < 2 * distance(gradients(plain, "other"), wanted)


def test_adapters_of_32_bits_on_a_base_of_16() -> None:
    ours, same = (made("mixtral", torch.bfloat16, ours=True) for _ in range(2))
    for name, param in ours.named_parameters():
        if "lora_" in name:
            param.data = param.data.float()
    found, wanted = gradients(ours, "default"), gradients(same, "default")
    assert distance(found, wanted) < 0.02


def test_the_models_own_forward_has_them_where_there_is_no_grouped_product() -> None:
    plain, ours = (made("mixtral", torch.float64, ours=each) for each in (False, True))
    for active in ("default", ["default", "other"]):
        assert distance(gradients(ours, active), gradients(plain, active)) < 1e-12


def test_what_is_kept_for_backward() -> None:
    """Nothing of the size of the layer's weights."""
    model = made("mixtral", torch.float32, ours=True)
    experts = next(module for module in model.modules() if hasattr(module, "gate_up_proj"))
    own = {param.untyped_storage().data_ptr() for param in model.parameters()}
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss_of(model, IDS)
    assert kept
    assert max(kept) < nn.Module.__getattr__(experts, "down_proj").numel()
