"""What the tests of monitors share: CSV files as numbers, an engine that writes them, its training."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_hf import Engine, initialize
from tests.engine.zero.zoo import WIDTH, Stack, mean_square
from tests.helpers.parity import base_config

LOSS, LR, SCALE = (f"Train_Samples_{name}.csv" for name in ("train_loss", "lr", "loss_scale"))
WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 5, "warmup_type": "linear"}}


def rows(path: Path) -> list[tuple[int, float]]:
    """(samples, number) of each row; the header is checked."""
    with path.open(newline="", encoding="utf-8") as file:
        header, *body = csv.reader(file)
    assert header == ["step", path.stem.removeprefix("Train_Samples_")]
    return [(int(x), float(value)) for x, value in body]


def make(folder: Path, stage: int = 0, **more: Any) -> Engine:
    """Micro-batches of 2, accumulated twice unless ``more`` says otherwise, CSV files in ``folder``/run."""
    torch.manual_seed(11)
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "scheduler": WARMUP,
        "csv_monitor": {"enabled": True, "output_path": str(folder), "job_name": "run"},
        **more,
    }
    return initialize(model=Stack(), config=base_config(stage, **settings))[0]


def batch(seed: int) -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed))


def micro_batch(engine: Engine, seed: int, factor: float = 1.0) -> float:
    """Forward, backward and ``step`` of one; its loss."""
    loss = mean_square(engine(batch(seed)).float()) * factor
    engine.backward(loss)
    engine.step()
    return loss.item()


def train(engine: Engine, steps: int, seed: int = 0) -> tuple[list[float], list[float]]:
    """Mean loss of this rank, and learning rate afterwards, of each step."""
    losses, rates = [], []
    count = engine.gradient_accumulation_steps()
    for step in range(steps):
        values = [micro_batch(engine, seed + 100 * step + index) for index in range(count)]
        losses.append(sum(values) / count)
        rates.append(engine.get_lr()[0])
    return losses, rates
