"""Experts that are all here, computed together, against the model's own forward: outputs and gradients."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_hf.config.types.parallel import ExpertParallelSection
from ds_hf.config.types.root import MeshShape
from ds_hf.engine.parallel.experts import compute
from ds_hf.engine.parallel.experts.dispatch import LocalExperts
from ds_hf.engine.parallel.experts.divide import divide_experts
from tests.helpers.experts import build, loss_of, planned

ALONE: Any = SimpleNamespace(shape=MeshShape())  # a mesh without a process group
KINDS = ("qwen3_moe", "gpt_oss", "aria", "nemotron_h", "muse_spark", "zaya")
IDS = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(1))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    loss = loss_of(model, IDS)
    loss.backward()
    found = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    return {"loss": loss.detach(), **found}


@pytest.mark.parametrize("kind", planned(KINDS))
def test_products_in_one_give_what_the_model_gives(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    inner = compute._linear
    monkeypatch.setattr(compute, "_linear", lambda *args: calls.append(args) or inner(*args))
    wanted = gradients(build(kind, experts="grouped_mm"))
    model = build(kind, experts="grouped_mm")
    divide_experts(model, ALONE, ExpertParallelSection(enabled=True))
    layers = [module for module in model.modules() if isinstance(module, LocalExperts)]
    if kind == "qwen3_moe":  # as transformers 5.17 makes it
        for layer in layers:
            for name in ("has_post_expert_norm", "_is_expert_parallel"):
                layer.__dict__.pop(name, None)
    found = gradients(model)
    assert len(calls) == 2 * len(layers) > 0
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=2e-4, atol=1e-5 * float(value.abs().max()))


def test_one_expert_after_another_where_the_file_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "_multiply", None)
    wanted = gradients(build("qwen3_moe", experts="eager").double())
    model = build("qwen3_moe", experts="grouped_mm").double()
    divide_experts(model, ALONE, ExpertParallelSection(enabled=True, use_grouped_mm=False))
    for name, value in gradients(model).items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-12, atol=1e-14)
