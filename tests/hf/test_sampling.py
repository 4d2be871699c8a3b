"""Batches of unequal size in the Trainer: every logged number as without DeepSpeed, at every stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ds_hf.errors import ConfigError
from tests.compat.common import run_user_code
from tests.compat.trainer_code import assert_equal_histories, config, fit, histories


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
