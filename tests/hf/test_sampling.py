"""Batches of unequal size in the Trainer: every logged number as without DeepSpeed, at every stage."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import wrapt
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler, DataLoader
from transformers import Trainer

from ds_hf.data.sampler import DeepSpeedDataSampler
from ds_hf.errors import ConfigError
from ds_hf.hf.sampling import tell_of_unequal_loaders
from tests.compat.common import run_user_code
from tests.compat.trainer_code import assert_equal_histories, config, fit, histories, start_afresh
from tests.helpers.logs import Lines


class Uneven(torch.utils.data.Dataset[Any]):
    """Sequences of 3 to 20 tokens."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= len(self):
            raise IndexError(index)
        tokens = [(3 * index + place) % 128 for place in range(3 + (7 * index) % 18)]
        return {"input_ids": tokens, "labels": tokens}


def pad(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)
    tokens = torch.zeros(len(rows), longest, dtype=torch.long)
    mask, labels = torch.zeros_like(tokens), torch.full_like(tokens, -100)
    for place, row in enumerate(rows):
        count = len(row["input_ids"])
        tokens[place, :count] = labels[place, :count] = torch.tensor(row["input_ids"])
        mask[place, :count] = 1
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


GIVEN = {"train_dataset": Uneven(), "data_collator": pad}


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return map(Uneven().__getitem__, range(40))


class Further(Stream):
    """What is told once has its name."""


def without_numbers(folder: str) -> tuple[str, list[list[str]]]:
    numpy.save(f"{folder}/metric.npy", numpy.arange(40))
    schedule = {"min_difficulty": 10, "max_difficulty": 40, "schedule_type": "fixed_linear"}
    steps = {"schedule_config": {"total_curriculum_step": 4, "difficulty_step": 2}}
    metric = {"index_to_metric_path": f"{folder}/metric.npy", "difficulty_type": "value", **schedule, **steps}
    learning = {"enabled": True, "curriculum_metrics": {"rank": {**metric, "clustering_type": "schedule_based"}}}
    sampling = {"data_sampling": {"enabled": True, "curriculum_learning": learning}}
    file = config(0, data_efficiency={"enabled": True, **sampling})
    with pytest.raises(ConfigError) as caught:
        fit(folder, file, trainer_arguments={**GIVEN, "train_dataset": Stream()})
    start_afresh()
    logging.getLogger("ds_hf").addHandler(lines := Lines(logging.WARNING))
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config={**file, "train_batch_size": 2}))
    told = []
    for data in (DataLoader(Uneven()), DataLoader(Uneven(), shuffle=True), DataLoader(Further())):
        lines.texts.clear()
        accelerator.prepare_data_loader(data)
        told.append([text for text in lines.texts if "metrics choose no samples" in text])
    return str(caught.value), told


def test_samples_that_metrics_cannot_choose_are_told(tmp_path: Path) -> None:
    (found,) = run_user_code(without_numbers, str(tmp_path), world_size=1)
    refused, (evaluated, shuffled, streamed) = found
    assert "metrics choose among samples by their numbers, and Stream has none" in refused
    assert evaluated == []
    assert "DataLoader of Uneven" in shuffled[0]
    assert "DataLoader of Further" in streamed[0]


def chosen_samples(folder: str) -> list[list[list[int]]]:
    """Micro-batches of this process: of a loader that is not prepared, and of one that is."""
    metric = {"index_to_metric_path": f"{folder}/metric.npy", "min_difficulty": 10, "max_difficulty": 39}
    schedule = {"schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 4, "difficulty_step": 1}}
    learning = {"enabled": True, "curriculum_metrics": {"rank": {**metric, **schedule}}}
    file = config(
        0, data_efficiency={"enabled": True, "data_sampling": {"enabled": True, "curriculum_learning": learning}}
    )
    start_afresh()
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config={**file, "train_batch_size": 8}))
    found = []
    for prepares in (False, True):
        place = accelerator.process_index, accelerator.num_processes
        sampler = DeepSpeedDataSampler(file["data_efficiency"], 40, 2, *place, gradient_accumulation_steps=2)
        loader: Any = DataLoader(range(40), batch_sampler=sampler)  # type: ignore[arg-type]
        if prepares:
            loader = accelerator.prepare_data_loader(loader)
        found.append([batch.tolist() for _, batch in zip(range(8), loader, strict=False)])
    return found


def test_accelerate_deals_chosen_samples_out_once(tmp_path: Path) -> None:
    numpy.save(tmp_path / "metric.npy", numpy.arange(40))
    for plain, prepared in run_user_code(chosen_samples, str(tmp_path), world_size=2):
        assert prepared == plain
        assert max(max(batch) for batch in plain[:2]) <= 17  # the first step's difficulty


BY_COST = {"train_sampling_strategy": "batch_rebalance", "gradient_accumulation_steps": 2, "trainer_arguments": GIVEN}


def by_cost(folder: str, stages: tuple[int, ...]) -> Any:
    return histories(folder, stages, BY_COST)


@pytest.mark.parametrize("stages", [(0, 3), pytest.param((1, 2), marks=pytest.mark.slow)])
def test_batches_of_equal_cost_weigh_tokens_exactly(tmp_path: Path, stages: tuple[int, ...]) -> None:
    for result in run_user_code(by_cost, str(tmp_path), stages):
        assert_equal_histories(result)
        assert len(result[0]) == 4


def alone(folder: str) -> list[dict[str, float]]:
    return fit(folder, **BY_COST)


def divided(folder: str, stages: tuple[int, ...]) -> Any:
    with pytest.raises(ConfigError, match="some steps would have the long samples alone"):
        fit(folder, config(1, sequence_parallel_size=2), **BY_COST)
    return {stage: fit(folder, config(stage, tensor_parallel={"autotp_size": 2}), **BY_COST) for stage in stages}


@pytest.mark.parametrize(("data", "stages"), [(1, (1,)), pytest.param(2, (0, 3), marks=pytest.mark.slow)])
def test_processes_that_share_layers_take_the_same_batches(tmp_path: Path, data: int, stages: tuple[int, ...]) -> None:
    plain = run_user_code(alone, str(tmp_path), world_size=data)[0]
    for found in run_user_code(divided, str(tmp_path), stages, world_size=2 * data):
        assert_equal_histories((plain, found))


def test_loaders_of_unequal_lengths_are_told() -> None:
    """13 samples in batches of two: four for the first of two processes, and three for the second."""
    lines, file = Lines(logging.WARNING), SimpleNamespace(hf_ds_config=SimpleNamespace(config={}))
    trainer = SimpleNamespace(args=SimpleNamespace(deepspeed_plugin=file), is_deepspeed_enabled=True)
    logging.getLogger("ds_hf").addHandler(lines)
    try:
        for samples, even in ((13, True), (12, False), (13, False)):
            dealt = BatchSamplerShard(BatchSampler(range(samples), 2, False), 2, 1, even_batches=even)
            loader: Any = SimpleNamespace(batch_sampler=dealt)
            assert tell_of_unequal_loaders(lambda given: given, trainer, (loader,), {}) is loader
            assert [("first process has 4 batch(es), the last 3," in text) for text in lines.texts] == (
                [True] if (samples, even) == (13, False) else []
            )
    finally:
        logging.getLogger("ds_hf").removeHandler(lines)
    assert isinstance(Trainer._get_dataloader, wrapt.FunctionWrapper | wrapt.BoundFunctionWrapper)
