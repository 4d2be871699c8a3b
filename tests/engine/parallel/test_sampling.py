"""Loaders whose samples metrics choose, in an engine and in the Trainer: on two processes, resumed in the middle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ds_hf import initialize
from ds_hf.data.sampler import ClusterDraws, DeepSpeedDataSampler
from ds_hf.engine.parallel.sampling import SampledLoader
from ds_hf.errors import ConfigError
from tests.compat.common import run_user_code
from tests.compat.trainer_code import config as trainer_config
from tests.compat.trainer_code import make_trainer
from tests.helpers.distributed import run_distributed

TOTAL, BATCH = 40, 8


def section(folder: str, **changes: Any) -> dict[str, Any]:
    metric = {
        "index_to_metric_path": f"{folder}/hard.npy",
        "min_difficulty": 10,
        "max_difficulty": 39,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 5, "difficulty_step": 1},
        **changes,
    }
    learning = {"enabled": True, "curriculum_metrics": {"hard": metric}}
    sampling = {"enabled": True, "num_epochs": 3, "num_workers": 0, "curriculum_learning": learning}
    return {"data_efficiency": {"enabled": True, "seed": 5, "data_sampling": sampling}}


def write(folder: Path) -> list[list[int]]:
    """The file of a metric; the batches of all processes."""
    np.save(folder / "hard.npy", np.arange(TOTAL)[::-1])
    draws = ClusterDraws(section(str(folder))["data_efficiency"], TOTAL, BATCH)
    return [next(draws) for _ in range(10)]


class Numbers(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return TOTAL

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(x).square().mean()


def loop(folder: str) -> dict[str, Any]:
    given = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 2},
        **section(folder),
    }

    def start() -> Any:
        engine, _, loader, _ = initialize(model=Net(), config=given, training_data=Numbers())
        return engine, loader

    def train(engine: Any, loader: Any, steps: int) -> list[list[int]]:
        found: list[list[int]] = []
        batches = iter(loader)
        for _ in range(steps):
            for _ in range(engine.gradient_accumulation_steps()):
                batch = next(batches)
                found.append([int(each) for each in batch.flatten()])
                engine.backward(engine(batch))
                engine.step()
        return found

    engine, loader = start()
    found: dict[str, Any] = {"batches": train(engine, loader, 4), "length": len(loader)}
    engine.save_checkpoint(folder)
    engine.set_data_post_process_func(lambda batch, state: (batch, state["current_difficulties"]))
    found["processed"] = next(iter(loader))[1]
    own = engine.deepspeed_io(Numbers(), data_sampler=loader.data_sampler)
    found["own"] = [int(each) for each in next(iter(own)).flatten()]
    plain = engine.deepspeed_io(Numbers(), batch_size=3, data_sampler=[5, 6, 7])
    found["plain"] = [int(each) for each in next(iter(plain)).flatten()]
    engine.destroy()
    engine, loader = start()
    engine.load_checkpoint(folder)
    found["batches"] += train(engine, loader, 4)
    engine.destroy()
    return found


def test_two_processes_take_parts_of_each_batch_and_resume_in_the_middle(tmp_path: Path) -> None:
    wanted = write(tmp_path)
    first, second = run_distributed(loop, 2, str(tmp_path), timeout=60)
    pairs = zip(first["batches"], second["batches"], strict=True)
    row = [sample for ours, others in pairs for sample in [*ours, *others]]
    assert row == [sample for batch in wanted[:8] for sample in batch]
    assert first["length"] == 3 * TOTAL // 4 + 1
    assert first["processed"] == {"hard": 39}
    assert first["own"] == wanted[0][:2]
    assert second["own"] == wanted[0][2:4]
    assert first["plain"] == [5, 6, 7]


def test_a_run_whose_batches_changed_goes_on_exactly_as_often_as_it_is_resumed(tmp_path: Path) -> None:
    write(tmp_path)
    given = section(str(tmp_path), schedule_config={"total_curriculum_step": 12, "difficulty_step": 1})

    def loader(steps: int, state: dict[str, Any] | None) -> SampledLoader:
        made = SampledLoader(
            Numbers(), DeepSpeedDataSampler(given["data_efficiency"], TOTAL, 2, 0, 1, None, steps), collate_fn=list
        )
        if state is not None:
            made.load_state_dict(state)
            assert made.state_dict() == state  # what a checkpoint's digest is of
        return made

    def take(made: SampledLoader, count: int) -> list[tuple[list[float], int]]:
        return [
            ([float(each) for each in batch], made.data_sampler.draws.step)
            for _, batch in zip(range(count), made, strict=False)
        ]

    first = loader(4, None)
    take(first, 16)
    straight = take(loader(8, first.state_dict()), 40)
    resumed = loader(8, first.state_dict())
    assert take(resumed, 8) == straight[:8]
    assert take(resumed, 8) == straight[8:16]  # a pass that begins anew
    again = loader(8, resumed.state_dict())
    assert take(again, 8) == straight[16:24]
    once_more = loader(8, again.state_dict())
    assert take(once_more, 16) == straight[24:]
    assert [step for _, step in straight[::8]] == [5, 6, 7, 8, 9]
    sampler = once_more.data_sampler
    other = loader(8, None).data_sampler
    other.load_state_dict(sampler.state_dict())
    assert other.state_dict() == sampler.state_dict()


class Lines(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return TOTAL

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.full((6,), index)
        return {"input_ids": tokens, "labels": tokens}


def trainer(folder: str) -> list[list[int]]:
    seen: list[list[int]] = []

    def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        seen.append([int(row["input_ids"][0]) for row in rows])
        return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}

    def run(steps: int, resume: bool) -> None:
        more = {"gradient_accumulation_steps": 2, "max_steps": steps, "save_strategy": "steps", "save_steps": 3}
        given = {"train_dataset": Lines(), "data_collator": collate}
        made = make_trainer(folder, trainer_config(1, **section(folder)), trainer_arguments=given, **more)
        made.train(resume_from_checkpoint=resume)

    run(3, False)
    first = seen[: 3 * 2]  # accelerate looks one batch ahead
    seen.clear()
    run(8, True)
    return [*first, *seen[: 5 * 2]]


def test_the_trainer_takes_the_same_samples_and_resumes_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    wanted = write(tmp_path)
    first, second = run_user_code(trainer, str(tmp_path))
    pairs = zip(first, second, strict=True)
    row = [sample for ours, others in pairs for sample in [*ours, *others]]
    assert row == [sample for batch in wanted[:8] for sample in batch]


def refused(folder: str) -> list[str]:
    found = []
    cases: list[tuple[dict[str, Any], Any]] = [
        (section(folder), torch.utils.data.TensorDataset(torch.ones(7, 1))),
        (section(folder, index_to_metric_path=f"{folder}/none.npy"), Numbers()),
    ]
    for more, data in cases:
        with pytest.raises((ConfigError, RuntimeError)) as caught:
            initialize(
                model=Net(), config={"train_batch_size": 1, **more, "optimizer": {"type": "Adam"}}, training_data=data
            )
        found.append(str(caught.value))
    return found


def test_files_that_do_not_fit_are_named_before_training(tmp_path: Path) -> None:
    write(tmp_path)
    ((length, missing),) = run_distributed(refused, 1, str(tmp_path), timeout=30)
    assert "is of 40 samples, and the data set has 7" in length
    assert "none.npy cannot be read" in missing
