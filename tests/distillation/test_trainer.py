"""The Trainer trains a distilled student as it comes: its loss is the distilled one, at every stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ds_hf.distillation import distill, teacher_engine
from tests.compat.common import largest_difference, run_user_code
from tests.compat.trainer_code import TOLERANCE, config, history, make_trainer, tiny_llama

RECIPE: dict[str, Any] = {"logits": 1.0, "labels": 0.5, "hidden": 0.25, "temperature": 2.0}


def distilled(folder: Path, stages: list[int]) -> tuple[Any, list[Any]]:
    def fit(place: Any, divided: bool) -> Any:
        torch.manual_seed(1)
        student = tiny_llama()
        teacher: Any = tiny_llama(num_hidden_layers=4, hidden_size=48).eval()
        if divided:
            teacher = teacher_engine(teacher, stage=3, dtype="fp32")
        handle = distill(student, teacher, **RECIPE)
        trainer = make_trainer(
            folder, place, trainer_arguments={"model": student}, gradient_accumulation_steps=2, max_steps=3
        )
        if not divided:
            teacher.to(trainer.args.device)
        trainer.train()
        assert set(handle.parts) == {"logits", "labels", "hidden"}
        return history(trainer)

    return fit(None, False), [fit(config(stage), True) for stage in stages]


@pytest.mark.slow
def test_two_engines_are_the_trainer_without(tmp_path: Path) -> None:
    for plain, found in run_user_code(distilled, tmp_path, [0, 2, 3]):
        assert len(plain) == 3
        for ours in found:
            assert largest_difference(ours, plain) <= TOLERANCE
