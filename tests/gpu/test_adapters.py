"""Adapters that are computed together, on a GPU: gradients are those of plain PEFT."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.modules.test_adapters import KINDS, assert_same_step, ids, make

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
