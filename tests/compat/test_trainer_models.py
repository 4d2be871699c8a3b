"""Several models in one script, each with a configuration of its own: a teacher that only infers, and a student."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import PreTrainedModel, Trainer

from tests.compat.common import AUTO_BATCH, largest_difference, run_user_code
from tests.compat.trainer_code import (
    PLAIN_ARGUMENTS,
    TOLERANCE,
    config,
    history,
    make_trainer,
    start_afresh,
    tiny_llama,
)


class Distilling(Trainer):
    """The usual recipe: the loss follows the teacher's logits."""

    teacher: Any = None

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        with torch.no_grad():
            target = self.teacher(**inputs).logits.softmax(-1)
        loss = outputs.loss + functional.cross_entropy(outputs.logits.transpose(1, 2), target.transpose(1, 2))
        return (loss, outputs) if return_outputs else loss


def teacher_model() -> PreTrainedModel:
    model = tiny_llama(num_hidden_layers=3, hidden_size=48).eval()
    return model.requires_grad_(False)


def distilled(folder: Path, stage: int) -> Any:
    """The student by the Trainer, the teacher prepared as TRL prepares its reference models."""
    import deepspeed

    def student(place: Any, teacher: Any) -> list[dict[str, float]]:
        trainer = make_trainer(folder, place, trainer_class=Distilling)
        trainer.teacher = teacher(trainer)
        trainer.train()
        return history(trainer)

    def frozen_engine(trainer: Any) -> Any:
        settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
        engine, *_ = deepspeed.initialize(model=teacher_model(), config=settings)
        engine.eval()
        return engine

    plain = student(None, lambda trainer: teacher_model().to(trainer.args.device))
    ours = student(config(stage), frozen_engine)
    return plain, ours


@pytest.mark.slow
@pytest.mark.feature("Trainer", "teacher at stage 3 without optimizer, student by the Trainer", pain="P8")
@pytest.mark.parametrize("stage", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_student_learns_from_a_sharded_teacher(stage: int, tmp_path: Path) -> None:
    for plain, ours in run_user_code(distilled, tmp_path, stage):
        assert len(ours) == 4
        assert largest_difference(ours, plain) <= TOLERANCE


def two_plugins() -> Any:
    """accelerate's documentation: one Accelerator and two plugins, the teacher's stage 3, the student's stage 2."""
    from accelerate import Accelerator, DeepSpeedPlugin

    from tests.compat.scripts.trainer_script import Sentences

    def train(accelerator: Any, teacher: Any, student: Any, optimizer: Any, loader: Any) -> list[float]:
        losses = []
        for batch in loader:
            batch = {name: value.to(accelerator.device) for name, value in batch.items()}
            with torch.no_grad():
                target = teacher(**batch).logits.softmax(-1)
            outputs = student(**batch)
            loss = functional.cross_entropy(outputs.logits.transpose(1, 2), target.transpose(1, 2))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(accelerator.gather(loss.detach()).mean()))
        return losses

    def loader() -> Any:
        return torch.utils.data.DataLoader(Sentences(24, seed=1), batch_size=2)

    start_afresh()
    plain = Accelerator(cpu="use_cpu" in PLAIN_ARGUMENTS)
    student = tiny_llama()
    optimizer = torch.optim.AdamW(student.parameters(), lr=5e-3)
    prepared = plain.prepare(student, optimizer, loader())
    expected = train(plain, teacher_model().to(plain.device), *prepared)

    start_afresh()
    plugins = {
        "student": DeepSpeedPlugin(
            hf_ds_config={**AUTO_BATCH, "zero_optimization": {"stage": 2}, "gradient_clipping": 0.0}
        ),
        "teacher": DeepSpeedPlugin(
            hf_ds_config={"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}
        ),
    }
    accelerator = Accelerator(deepspeed_plugins=plugins)
    student = tiny_llama()
    optimizer = torch.optim.AdamW(student.parameters(), lr=5e-3)
    prepared = accelerator.prepare(student, optimizer, loader())
    accelerator.state.select_deepspeed_plugin("teacher")
    teacher = accelerator.prepare(teacher_model())
    accelerator.state.select_deepspeed_plugin("student")
    return (
        expected,
        train(accelerator, teacher, *prepared),
        accelerator.state.get_deepspeed_plugin("teacher").zero_stage,
    )


@pytest.mark.slow
@pytest.mark.feature("accelerate", "teacher and student, each with its own plugin", pain="P8")
def test_each_model_has_its_own_plugin() -> None:
    for expected, ours, stage in run_user_code(two_plugins):
        assert stage == 3
        assert ours == pytest.approx(expected, abs=TOLERANCE)
