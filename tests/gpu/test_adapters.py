"""Adapters that are computed together, on a GPU: gradients are those of plain PEFT."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ds_hf.engine.modules.adapters import AdaptedLayer, FusedAdapters
from tests.engine.modules.test_adapters import KINDS, assert_same_step, ids, make
from tests.engine.modules.test_gated import computed_by

pytestmark = pytest.mark.gpu


def loss_of(net: Any) -> Tensor:
    read = ids().cuda()
    return net(input_ids=read, labels=read).loss  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_gradients_are_those_of_plain_peft(family: str, kind: str) -> None:
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-3), (torch.bfloat16, 0.1)):
        assert_same_step(make(family, dtype, **KINDS[kind]).cuda(), tolerance, loss_of)


def test_dropout_draws_the_masks_of_plain_peft() -> None:
    assert_same_step(make(dtype=torch.float64, lora_dropout=0.3).cuda(), 1e-12, loss_of)


@pytest.mark.parametrize("liger", [False, True])
@pytest.mark.parametrize("kind", list(KINDS))
def test_products_of_gates_are_not_kept(kind: str, liger: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's operations and by Liger's function, whose backward overwrites what it has saved."""
    for dtype, tolerance in ((torch.float32, 1e-3), (torch.bfloat16, 0.1)):
        model = make(dtype=dtype, **KINDS[kind]).cuda()
        if liger:
            swiglu = pytest.importorskip("liger_kernel.transformers.swiglu").LigerSwiGLUMLP
            computed_by(model, swiglu.forward)
        seen: list[bool] = []
        own = AdaptedLayer._take

        def taken(gate: AdaptedLayer, up: AdaptedLayer, own: Any = own, seen: list[bool] = seen) -> Any:
            found = own(gate, up)
            seen.append(found is not None)
            return found

        monkeypatch.setattr(AdaptedLayer, "_take", staticmethod(taken))
        assert_same_step(model, tolerance, loss_of)
        assert seen == [True, True]


def test_activations_take_less_memory() -> None:
    """A product of gates and, by torch's operations, what silu gave, of each block."""
    taken = []
    for fused in (False, True):
        model = make(dtype=torch.bfloat16).cuda()
        if fused:
            FusedAdapters(model)
        read = torch.randint(3, 64, (64, 32), device="cuda")
        model(input_ids=read, labels=read).loss.backward()
        before = torch.cuda.memory_allocated()
        loss = model(input_ids=read, labels=read).loss
        taken.append(torch.cuda.memory_allocated() - before)
        del loss
    assert taken[0] - taken[1] >= 2 * 2 * (64 * 32 * 48 * 2)  # two tensors in each of two blocks
