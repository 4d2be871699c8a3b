"""A small model, files for it, and training by an engine and by plain torch."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.helpers.logs import Lines

STEPS, MICRO, VOCAB = 6, 4, 16
LR = 1e-2


class Net(nn.Module):
    """An embedding, two layers in blocks, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCAB, 8)
        self.fc1 = nn.Linear(8, 16)
        self.fc2 = nn.Linear(16, 8)
        self.head = nn.Linear(8, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        return cross_entropy(self.head(self.fc2(self.fc1(self.emb(x)).relu())), (x * 3 + 1) % VOCAB)


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batches(world: int, steps: int = STEPS) -> Tensor:
    """Token ids, ``[step, rank, sample]``."""
    return torch.randint(0, VOCAB, (steps, world, MICRO), generator=torch.Generator().manual_seed(5))


def method(
    params: dict[str, Any], modules: list[str], related: list[list[str]] | None = None, **shared: Any
) -> dict[str, Any]:
    """The section of one method, with one group."""
    group: dict[str, Any] = {"params": params, "modules": modules}
    if related is not None:
        group["related_modules"] = related
    return {
        "shared_parameters": {"enabled": True, "schedule_offset": 2, **shared},
        "different_groups": {"one": group},
    }


def config(section: dict[str, Any], stage: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01}},
        "zero_optimization": {"stage": stage},
        "compression_training": section,
        **more,
    }


def run(engine: Any, data: Tensor, rank: int = 0) -> list[float]:
    """Losses of this process over ``data``, ``[step, rank, sample]``."""
    losses = []
    for step in data:
        loss = engine(step[rank].to(engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@contextmanager
def logged() -> Iterator[list[str]]:
    """What ds_hf logs inside."""
    lines = Lines()
    logger = logging.getLogger("ds_hf")
    logger.addHandler(lines)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        yield lines.texts
    finally:
        logger.setLevel(level)
        logger.removeHandler(lines)
