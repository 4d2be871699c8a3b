"""What the accelerate tests share, as users would write it: data, a model, a loop; and the same loop in torch alone.

``plain_training`` is the reference: one process, torch's AdamW, the global batch that ``world`` processes see together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # of the reference: it computes where the engine does
LR = 1e-2
MICRO = 2


class Regressor(nn.Module):
    """Two hidden layers; returns predictions."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x).squeeze(-1)


def dataset(count: int) -> TensorDataset:
    """``count`` inputs of 8 numbers with a target each."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count, 8, generator=generator)
    return TensorDataset(x, torch.sin(x.sum(-1)))


def loader(count: int) -> DataLoader[Any]:
    """The data in their order, ``MICRO`` at a time."""
    return DataLoader(dataset(count), batch_size=MICRO)


def loss_of(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """Mean squared error."""
    x, y = batch
    return nn.functional.mse_loss(model(x).float(), y)


def fresh_start() -> None:
    """What accelerate's own tests do between two runs in one process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def train(accelerator: Accelerator, model: Any, optimizer: Any, scheduler: Any, batches: Any) -> list[dict[str, Any]]:
    """The loop of accelerate's documentation; one row a micro-batch, with the loss over all processes."""
    rows = []
    for batch in batches:
        with accelerator.accumulate(model):
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0) if accelerator.sync_gradients else None
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
        mean = float(accelerator.gather(loss.detach().reshape(1)).mean())
        rows.append({"loss": mean, "norm": norm, "lr": optimizer.param_groups[0]["lr"]})
    return rows


def plain_batches(world: int, count: int) -> list[list[Tensor]]:
    """What ``world`` processes see together, batch by batch."""
    return [[part.to(DEVICE) for part in batch] for batch in DataLoader(dataset(count), batch_size=MICRO * world)]


def plain_training(
    world: int, count: int, *, accumulation: int = 1, clip: float = 1.0, lrs: Sequence[float] | None = None
) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """The same in torch: rows as ``train`` gives them (``norm`` before clipping), and the weights at the end.

    The last group of micro-batches may be short; like accelerate it is divided by ``accumulation`` all the same.
    """
    model = Regressor().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    batches = plain_batches(world, count)
    rows = []
    for index, batch in enumerate(batches):
        loss = loss_of(model, batch)
        (loss / accumulation).backward()
        norm = None
        if (index + 1) % accumulation == 0 or index + 1 == len(batches):
            norm = float(nn.utils.clip_grad_norm_(model.parameters(), clip))
            if lrs is not None:
                optimizer.param_groups[0]["lr"] = lrs[index // accumulation]
            optimizer.step()
            optimizer.zero_grad()
        rows.append({"loss": loss.item(), "norm": norm, "lr": optimizer.param_groups[0]["lr"]})
    return rows, {name: value.detach().cpu() for name, value in model.state_dict().items()}
