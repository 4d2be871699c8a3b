"""Two Trainers that share their TrainingArguments, as scripts have them that train in two phases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import Trainer

from tests.compat.common import largest_difference, run_user_code
from tests.compat.scripts.trainer_script import Sentences
from tests.compat.trainer_code import TOLERANCE, arguments, config, history, tiny_llama


def in_two_phases(folder: str, stage: int | None) -> list[list[dict[str, float]]]:
    args = arguments(folder, None if stage is None else config(stage), max_steps=2)
    given: dict[str, Any] = {"train_dataset": Sentences(60, seed=1), "eval_dataset": Sentences(12, seed=2)}
    first = Trainer(model=tiny_llama(), args=args, **given)
    first.train()
    args.per_device_train_batch_size, args.gradient_accumulation_steps, args.learning_rate = 3, 2, 2e-3
    second = Trainer(model=tiny_llama(), args=args, **given)
    second.train()
    return [history(first), history(second), [{"eval_loss": each.evaluate()["eval_loss"]} for each in (first, second)]]


def differences(folder: str) -> list[float]:
    """Of what is logged and evaluated, from the Trainer alone."""
    plain = in_two_phases(folder, None)
    ours = [in_two_phases(folder, stage) for stage in (2, 3)]
    return [largest_difference(found, alone) for each in ours for found, alone in zip(each, plain, strict=True)]


def test_a_second_trainer_of_the_same_arguments(tmp_path: Path) -> None:
    for found in run_user_code(differences, str(tmp_path)):
        assert max(found) <= TOLERANCE
