"""Blocks that drop tokens, or are left out, in checkpoints of a kind that computes them without gradients first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ds_hf import initialize
from tests.engine.modules.test_layer_drop import settings as left_out
from tests.engine.modules.test_token_drop import settings as dropped
from tests.helpers.distributed import run_distributed

DEPTH, LENGTH, WIDTH = 4, 12, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states + torch.tanh(self.inner(hidden_states.cumsum(1)))


class Model(nn.Module):
    """Blocks one after another, each in a checkpoint that is reentrant, or in none."""

    def __init__(self, checkpoints: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.checkpoints = nn.Linear(WIDTH, WIDTH), checkpoints
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True) if self.checkpoints else block(x)
        return x.square().mean()


def train(config: dict[str, Any]) -> dict[bool, Any]:
    found = {}
    for checkpoints in (False, True):
        engine, *_ = initialize(model=Model(checkpoints).double(), config=config)
        losses = []
        for step in range(4):
            rows = torch.randn(2, 2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            both = [engine(each) for each in rows]  # two calls before a backward
            engine.backward((both[0] + 2 * both[1]) / 3)
            engine.step()
            losses += [loss.item() for loss in both]
        with torch.no_grad():  # nothing trains, though the model does
            losses.append(engine(rows[0]).item())
            losses.append(engine.module.blocks[1](rows[0]).square().mean().item())
        found[checkpoints] = losses, [param.detach().clone() for param in engine.module.parameters()]
        engine.destroy()
    return found


@pytest.mark.parametrize("config", [dropped(1), left_out(1)], ids=["tokens", "blocks"])
def test_a_reentrant_checkpoint_computes_the_same_twice(config: dict[str, Any]) -> None:
    (found,) = run_distributed(train, 1, config, timeout=60)
    (losses, weights), (again, weights_again) = found[False], found[True]
    assert again == pytest.approx(losses, abs=1e-12)
    for one, other in zip(weights, weights_again, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-12)
