"""A gradient of a gradient: forces inside forward, gradient penalties, products with the Hessian."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from ds_hf import initialize
from tests.helpers.distributed import run_distributed
from tests.helpers.parity import full_weights

D = 16


class Energy(nn.Module):
    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(D, D), nn.SiLU(), nn.Linear(D, D), nn.Tanh()) for _ in range(4)]
        self.blocks = nn.ModuleList(blocks)
        self.out = nn.Linear(D, 1)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x))
        return self.out(x).pow(2).mean()  # type: ignore[no-any-return]


class Forces(Energy):
    """The gradient is taken inside forward, of evaluation too."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().clone().requires_grad_(True)
            (force,) = torch.autograd.grad(super().forward(x), x, create_graph=True)
        return (force - x.detach()).pow(2).mean()


def from_forward(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = model(x)
    with torch.no_grad():
        model(x)
    return loss


class FunctionalForces(Energy):
    """The gradient is torch.func's, and its directions are vmap's and jvp's."""

    def forward(self, x: Tensor) -> Tensor:
        energy = super().forward
        forces = torch.func.vmap(torch.func.grad(lambda point: energy(point[None])))(x)
        _, slope = torch.func.jvp(energy, (x,), (torch.ones_like(x),))
        return (forces - x).pow(2).mean() + slope


def penalty(model: Any, x: Tensor) -> Tensor:
    """WGAN-GP: another call between the gradient and its backward."""
    point = x.clone().requires_grad_(True)
    (slope,) = torch.autograd.grad(model(point), point, create_graph=True)
    loss: Tensor = model(x * 0.5) + ((slope.norm(dim=1) - 1) ** 2).mean()
    return loss


def hessian(model: Any, x: Tensor) -> Tensor:
    """The gradient goes to the parameters."""
    params = [param for param in model.parameters() if param.requires_grad]
    slopes = torch.autograd.grad(model(x), params, create_graph=True)
    squares = [slope.pow(2).sum() for slope in slopes]
    return torch.stack(squares).sum() * 1e-2


def mean_flow(model: Any, x: Tensor) -> Tensor:
    """The whole engine is called inside jvp, and its derivative is a target."""
    value, slope = torch.func.jvp(model, (x,), (torch.ones_like(x),))
    loss: Tensor = (value - 1 - slope.detach()) ** 2 * 0.1 + slope * 0.1
    return loss


def tangent(model: Any, x: Tensor) -> Tensor:
    """Derivatives of torch's own forward mode, whose graph does not go through the output."""
    with forward_ad.dual_level():
        slope: Tensor = forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
        return slope * 0.3


def rows(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = torch.func.vmap(model)(x[:, None]).mean()
    return loss


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Tensor], Tensor]]] = {
    "forces": (Forces, from_forward),
    "checkpointed forces": (lambda: Forces(checkpointed=True), from_forward),
    "functional forces": (FunctionalForces, from_forward),
    "penalty": (Energy, penalty),
    "hessian": (Energy, hessian),
    "mean flow": (Energy, mean_flow),
    "tangent": (Energy, tangent),
    "rows": (Energy, rows),
}


def worst(name: str, accumulation: int, driven: bool) -> tuple[float, float, int]:
    """Differences of losses and of weights from one process in three steps; bytes that stay gathered after them."""
    make, loss_of = CASES[name]
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "ds_hf": {"join_blocks": False},
    }
    engine, *_ = initialize(model=make(), config=config)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    off = 0.0
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(accumulation):
            seed = torch.Generator().manual_seed(10 * step + micro)
            data = torch.randn(world, 4, D, generator=seed)
            losses = [loss_of(plain, x) for x in data]
            (sum(losses) / world / accumulation).backward()  # type: ignore[union-attr]
            loss = loss_of(engine, data[rank])
            if driven:
                engine.backward(loss)
            else:
                loss.backward()
            engine.step()
            off = max(off, abs(loss.item() - losses[rank].item()))
        optimizer.step()
    held = sum(b.full.untyped_storage().nbytes() for unit in engine.units for b in unit.buffers if b.sharded)
    weights = full_weights(engine.module)
    far = max((weights[key] - value).abs().max().item() for key, value in plain.named_parameters())
    engine.destroy()
    return off, far, held


def all_of(names: list[str]) -> dict[str, tuple[float, float, int]]:
    found = {}
    for name in names:
        for accumulation, driven in ((1, True), (2, False)):
            found[f"{name}, {accumulation} micro-batches, driven: {driven}"] = worst(name, accumulation, driven)
    return found


@pytest.mark.parametrize(
    "names",
    [["forces", "checkpointed forces", "functional forces"], ["penalty", "hessian"], ["mean flow", "tangent", "rows"]],
)
def test_double_backward_through_sharded_blocks(names: list[str]) -> None:
    for found in run_distributed(all_of, 2, names, timeout=60):
        for name, (loss, weights, held) in found.items():
            assert loss < 1e-5, name
            assert weights < 1e-5, name
            assert held == 0, name
