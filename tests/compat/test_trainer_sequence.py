"""The Trainer with divided sequences (``ParallelismConfig(sp_size=)``), against the Trainer alone in one process.

A batch of one process is what the processes of a sequence share, so 2 of them make the steps of one; beside 2-fold data
parallelism, two accumulated micro-batches make the steps of four.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import ParallelismConfig
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Trainer

from ds_hf.engine.zero.gather import GatheredParameters
from tests.compat.common import largest_difference, run_user_code
from tests.compat.scripts.trainer_script import Sentences
from tests.compat.trainer_code import config, history, make_trainer

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="gloo processes")
SEQUENCE = 2


class Equal(Sentences):
    """As many tokens count in every sequence: the mean of means is the mean. The first part of some has none."""

    def __init__(self, count: int, seed: int) -> None:
        super().__init__(count, seed)
        self.masked = [9] * count


DATA: dict[str, Any] = {"train_dataset": Equal(64, seed=1), "eval_dataset": Equal(16, seed=2)}
EVALUATING: dict[str, Any] = {
    "eval_strategy": "steps",
    "per_device_eval_batch_size": 2,
    "eval_steps": 2,
    "max_steps": 4,
}


def trainer(folder: Path, deepspeed: Mapping[str, Any] | None, **more: Any) -> Trainer:
    if deepspeed is not None and "sequence_parallel_size" not in deepspeed:
        more["parallelism_config"] = ParallelismConfig(sp_size=SEQUENCE, sp_backend="deepspeed")
    return make_trainer(folder, deepspeed, trainer_arguments=DATA, **more)


def logged(folder: Path, deepspeed: Mapping[str, Any] | None = None, **more: Any) -> list[dict[str, Any]]:
    made = trainer(folder, deepspeed, **more)
    made.train()
    return numbers(made)


def numbers(made: Trainer) -> list[dict[str, Any]]:
    """What was logged, and what does not depend on time of the rest."""
    last = made.state.log_history[-1]
    return [
        *history(made),
        {"epoch": made.state.epoch, "flos": last["total_flos"], "train_loss": last["train_loss"]},
        {"tokens": float(made.state.num_input_tokens_seen)},
    ]


def alone(folder: Path, **more: Any) -> list[dict[str, Any]]:
    (found,) = (
        run_user_code(logged, folder, world_size=1, **more)
        if not more
        else run_user_code(logged_with, folder, more, world_size=1)
    )
    return found  # type: ignore[no-any-return]


def logged_with(folder: Path, more: dict[str, Any]) -> list[dict[str, Any]]:
    return logged(folder, **more)


def logged_at(folder: Path, stages: list[int], more: dict[str, Any], **file: Any) -> dict[int, list[dict[str, Any]]]:
    return {stage: logged(folder / str(stage), config(stage, **file), **more) for stage in stages}


def assert_same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(found) == len(expected) > 4
    assert [sorted(row) for row in found] == [sorted(row) for row in expected]
    for row, wanted in zip(found, expected, strict=True):
        for key, value in wanted.items():
            tolerance = 1e-4 if key == "grad_norm" else 1e-5
            assert math.isclose(row[key], value, rel_tol=tolerance, abs_tol=1e-7), (key, row, wanted)


COUNTING: dict[str, Any] = {**EVALUATING, "include_num_input_tokens_seen": "all"}


def logged_by_each(folder: Path) -> list[list[dict[str, Any]]]:
    """Asked for by a ``ParallelismConfig``, and by the file alone, which may say how many samples a step has."""
    batch = {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
    file = {**config(3), **batch, "sequence_parallel_size": SEQUENCE}
    return [logged(folder / "2", config(2), **COUNTING), logged(folder / "3", file, **COUNTING)]


def test_every_logged_number_of_two_processes(tmp_path: Path) -> None:
    expected = alone(tmp_path / "alone", **COUNTING)
    for found in run_user_code(logged_by_each, tmp_path):
        for history_ in found:
            assert_same(history_, expected)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_logged_number_of_every_stage_beside_data_parallelism(tmp_path: Path, checkpointing: bool) -> None:
    more = {**COUNTING, "gradient_checkpointing": checkpointing, "max_steps": 3, "eval_steps": 3}
    expected = alone(tmp_path / "alone", **more, gradient_accumulation_steps=4)
    more["gradient_accumulation_steps"] = 2
    for found in run_user_code(logged_at, tmp_path, [0, 1, 2, 3], more, world_size=4, timeout=200.0):
        for history_ in found.values():
            assert_same(history_, expected)


SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6}


def trained(folder: Path, stage: int, sequence: int, resume: str | None) -> tuple[list[dict[str, float]], float]:
    """What was logged, and how far what ``save_model`` wrote is from what was trained."""
    more = {} if sequence == 1 else {"parallelism_config": ParallelismConfig(sp_size=sequence, sp_backend="deepspeed")}
    made = make_trainer(folder, config(stage), trainer_arguments=DATA, **SAVING, **more)
    made.train(resume_from_checkpoint=resume)
    made.save_model(str(folder / "model"))
    dist.barrier()
    saved = load_file(folder / "model" / "model.safetensors")
    with GatheredParameters(list(made.model.parameters())):
        differences = [(saved[name] - param.detach()).abs().max() for name, param in made.model.named_parameters()]
    return history(made), float(max(differences))


SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in [(2, 2, 2), (3, 2, 1), (1, 1, 2), (0, 2, 2), (3, 2, 2)]]


@pytest.mark.parametrize(("stage", "before", "after"), SLOW)
def test_resume_with_as_many_processes_and_with_others(tmp_path: Path, stage: int, before: int, after: int) -> None:
    whole = run_user_code(trained, tmp_path, stage, before, None, world_size=before)
    resumed = run_user_code(trained, tmp_path, stage, after, str(tmp_path / "checkpoint-3"), world_size=after)
    for steps, difference in resumed:
        assert len(steps) == 6  # with those before, from the checkpoint
        assert largest_difference(steps, whole[0][0]) < (1e-10 if before == after else 1e-5)
        assert difference == 0.0
    if stage == 2:
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        assert loaded.config._attn_implementation == "sdpa"
        assert "ds_hf" not in (tmp_path / "model" / "config.json").read_text()
