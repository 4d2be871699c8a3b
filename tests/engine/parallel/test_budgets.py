"""Batches of a budget of tokens in an engine: two processes, resumed in the middle, against plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.runtime.data_pipeline.data_sampling.variable_batch_size_and_lr import (
    get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed as make,
)
from torch import nn

from ds_hf import initialize
from ds_hf.data.batching import batch_by_seqlens
from ds_hf.errors import ConfigError
from tests.helpers.distributed import run_distributed

LENGTHS = [int(each) for each in np.random.default_rng(2).integers(3, 20, 61)]
BATCH, BUDGET, STEPS = 4, 50, 9


def settings(folder: str, stage: int, **changes: Any) -> dict[str, Any]:
    budget = {"enabled": True, "metrics_path": f"{folder}/lengths.npy", "max_tokens": BUDGET, **changes}
    return {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "data_efficiency": {"enabled": True, "data_sampling": {"enabled": True, "dynamic_batching": budget}},
    }


class Numbers(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), float(LENGTHS[index])]) / 20


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))


def by_hand() -> list[float]:
    """The rate of each step, and a number of the weights in the end."""
    packs, sizes, _ = batch_by_seqlens(LENGTHS, BUDGET, effective_batch_size=BATCH)
    model, data = net(), Numbers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = []
    for step in range(STEPS):
        number = step % len(sizes)
        optimizer.param_groups[0]["lr"] = 0.01 * sizes[number] / BATCH
        found.append(optimizer.param_groups[0]["lr"])
        group = packs[number * BATCH :][:BATCH]
        losses = [model(torch.stack([data[sample] for sample in samples])).square().mean() for _, samples in group]
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
    return [*found, sum(float(param.detach().abs().sum()) for param in model.parameters())]


def train(folder: str) -> dict[int, list[float]]:
    result = {}
    for stage in (0, 2):
        found: list[float] = []
        for first, last in ((0, 5), (5, STEPS)):
            given = settings(folder, stage)
            engine, _, loader, schedule = initialize(model=net(), config=given, training_data=Numbers())
            if first:
                engine.load_checkpoint(folder, tag=f"stage{stage}")
            assert schedule is engine.lr_scheduler
            batches = iter(loader)
            for _ in range(first, last):
                found.append(engine.get_lr()[0])
                for _ in range(engine.gradient_accumulation_steps()):
                    try:
                        batch = next(batches)
                    except StopIteration:
                        batches = iter(loader)
                        batch = next(batches)
                    engine.backward(engine(batch).square().mean())
                    engine.step()
            if not first:
                engine.save_checkpoint(folder, tag=f"stage{stage}")
            weights = sum(float(param.detach().abs().sum()) for param in engine.module.parameters())
            engine.destroy()
        result[stage] = [*found, weights]
    return result


def test_two_processes_take_as_many_batches_and_scale_the_rate(tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.array(LENGTHS))
    wanted = by_hand()
    assert len(set(wanted)) > 3
    for found in run_distributed(train, 2, str(tmp_path), timeout=60):
        for numbers in found.values():
            assert numbers == pytest.approx(wanted, rel=1e-5)


def one_process(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, changes in (("missing", {"metrics_path": None}), ("short", {"metrics_path": f"{folder}/short.npy"})):
        with pytest.raises(ConfigError) as caught:
            initialize(model=net(), config=settings(folder, 0, **changes), training_data=Numbers())
        found[name] = str(caught.value)
    engine, *_ = initialize(model=net(), config=settings(folder, 0, lr_scaling_method="none"))
    loader, schedule, _ = make(Numbers(), engine, batch_seqlens_fn=lambda rows: [int(row[1] * 20) for row in rows])
    packs, *_ = batch_by_seqlens(LENGTHS, BUDGET, effective_batch_size=BATCH)
    found["batches"] = loader.packs == [pack for _, pack in packs]
    found["rate"] = schedule
    found["length"] = len(list(loader)) == len(loader)
    engine.destroy()
    return found


def test_lengths_that_do_not_fit_and_a_loader_of_a_script(tmp_path: Path) -> None:
    np.save(tmp_path / "short.npy", np.array(LENGTHS[:5]))
    (found,) = run_distributed(one_process, 1, str(tmp_path), timeout=30)
    assert "no file of lengths is named" in found["missing"]
    assert "has the lengths of 5 samples, and the data set has 61" in found["short"]
    assert found["batches"]
    assert found["length"]
    assert found["rate"] is None
