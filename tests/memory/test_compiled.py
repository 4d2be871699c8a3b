"""Compiled blocks in predictions, without values. Against real training: ``test_against_engine``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_hf.memory import Predictor, Workload
from ds_hf.memory.compiled import CompiledBlocks

SHAPE = "llama:hidden=128,layers=2,heads=4,kv_heads=4,intermediate=352,vocab=512"


@pytest.mark.slow
def test_budgets_lower_the_peak() -> None:
    predictor = Predictor(SHAPE, Workload(micro_batch=4, seq_len=512))

    def peak(**own: Any) -> int:
        config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}, "ds_hf": own}
        return predictor.predict(config, micro_batch=4).device_peak

    peaks = [peak(), peak(compile="blocks"), peak(compile="blocks", activation_memory_budget=0.5)]
    assert peaks[0] > peaks[1] > peaks[2], peaks


class Looks(nn.Module):
    """A block whose code depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) if x.sum().item() >= 0 else x


class Squares(Looks):
    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.linear(x * scale).square()


def test_what_cannot_be_traced_stays_as_it_is() -> None:
    blocks: list[nn.Module] = [Looks(), Squares(), Squares()]
    compiled, x = CompiledBlocks(blocks, None), torch.ones(2, 8)
    expected = torch.tanh(blocks[0].linear(x))  # type: ignore[operator]
    torch.testing.assert_close(blocks[0](x), expected)
    assert list(compiled.eager) == blocks[:1]
    for block, scale in zip(blocks[1:], (1.0, 2.0), strict=True):  # another number: other code
        y = block(x, scale=scale)
        torch.testing.assert_close(y, type(block).forward(block, x, scale=scale))
        y.sum().backward()
        assert block.linear.weight.grad is not None  # type: ignore[union-attr]
    assert len(compiled.eager) == 1
    compiled.remove()
    assert not any("forward" in vars(block) for block in blocks)
