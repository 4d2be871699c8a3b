"""What a Trainer writes and reads: limits, weights alone, the best model, resuming with other processes or stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Trainer

from tests.compat.common import WORLD, largest_difference, run_user_code
from tests.compat.scripts.trainer_script import Sentences
from tests.compat.trainer_code import STAGES, TOLERANCE, arguments, config, fit, history, make_trainer
from tests.compression.common import logged

SAVING = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
RISING = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}


def folders(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint-*"))


# -- the best model (P20) -----------------------------------------------------------------------------------------


def closeness(prediction: Any) -> dict[str, float]:
    """A metric that is best at the first evaluation."""
    return {"spread": float(-prediction.predictions.std())}


def best_of(folder: Path, stage: int, weights_only: bool) -> Any:
    more = {**SAVING, "save_total_limit": 1, "save_only_model": weights_only, "max_steps": 6}
    more |= {"load_best_model_at_end": True, "metric_for_best_model": "spread", "greater_is_better": True}
    trainer = make_trainer(folder, config(stage), trainer_arguments={"compute_metrics": closeness}, **more)
    trainer.train()
    told = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    best = Path(trainer.state.best_model_checkpoint)
    after = trainer.evaluate()["eval_loss"]
    names = sorted(path.name for path in best.iterdir())
    trainer.save_model(str(folder / "final"))
    return told, after, best.name, folders(folder), names


@pytest.mark.feature("Trainer", "best model by `compute_metrics`, `save_total_limit=1`", pain="P20")
@pytest.mark.feature("Trainer", "`save_only_model` with `load_best_model_at_end`", pain="P20")
@pytest.mark.parametrize(
    ("stage", "weights_only"),
    [
        pytest.param(stage, alone, marks=() if (stage, alone) == (3, False) else pytest.mark.slow)
        for stage in STAGES
        for alone in (True, False)
    ],
)
def test_best_model_is_back_at_the_end(stage: int, weights_only: bool, tmp_path: Path) -> None:
    for told, after, best, left, names in run_user_code(best_of, tmp_path, stage, weights_only):
        assert after == told[0] != told[-1]
        assert best == "checkpoint-2"
        assert left == ["checkpoint-2"]
        assert ("latest" in names) is not weights_only
        assert "model.safetensors" in names
    checkpoint, final = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("checkpoint-2", "final")
    )
    assert all(torch.equal(checkpoint[name], final[name]) for name in checkpoint)


def goes_on_after_best(folder: Path, stage: int) -> Any:
    """Weights alone are loaded into masters too: another train() starts from them."""
    trainer = make_trainer(
        folder, config(stage, bf16={"enabled": "auto"}), bf16=True, save_only_model=True, **SAVING, **RISING
    )
    trainer.train()
    optimizer = trainer.deepspeed.optimizer
    gap = 0.0
    for unit in trainer.deepspeed.units:
        for buffer in unit.buffers:
            master = optimizer.master(buffer)
            gap = max(gap, float((buffer.owned(whole=optimizer.whole).float() - master).abs().max()))
    return gap


@pytest.mark.parametrize("stage", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_masters_follow_weights_that_are_loaded_alone(stage: int, tmp_path: Path) -> None:
    assert run_user_code(goes_on_after_best, tmp_path, stage) == [0.0] * WORLD


# -- limits -------------------------------------------------------------------------------------------------------


def limited(folder: Path) -> list[str]:
    fit(folder, config(3), max_steps=8, save_total_limit=2, **SAVING)
    return folders(folder)


@pytest.mark.feature("Trainer", "`save_total_limit`")
def test_only_the_latest_checkpoints_stay(tmp_path: Path) -> None:
    assert run_user_code(limited, tmp_path) == [["checkpoint-6", "checkpoint-8"]] * WORLD


# -- going on (P18, P22) ------------------------------------------------------------------------------------------


RUN = {
    "max_steps": 6,
    "save_strategy": "steps",
    "save_steps": 3,
    "warmup_steps": 2,
    "train_sampling_strategy": "sequential",
}


def first_half(folder: Path, stage: int, batch: int) -> Any:
    return fit(folder, config(stage), per_device_train_batch_size=batch, **RUN)


def second_half(folder: Path, stage: int, batch: int, more: dict[str, Any]) -> Any:
    trainer = make_trainer(folder, config(stage), per_device_train_batch_size=batch, **RUN, **more)
    trainer.train(resume_from_checkpoint=True)
    return history(trainer), trainer.state.global_step


@pytest.mark.feature("Trainer", "resumes with another number of processes and at another stage", pain="P18 P22")
@pytest.mark.parametrize(
    ("before", "after"), [(2, 3), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((3, 1), (0, 2)))]
)
def test_resumed_with_other_processes_at_another_stage(before: int, after: int, tmp_path: Path) -> None:
    """The global batch stays 4: one process takes all of it, and sees the same samples."""
    (whole, *_) = run_user_code(first_half, tmp_path, before, 4 // WORLD)
    for checkpoint in ("checkpoint-6",):
        remove(tmp_path / checkpoint)
    ((resumed, steps),) = run_user_code(second_half, tmp_path, after, 4, {}, world_size=1)
    assert steps == 6
    late = [row for row in resumed if row["step"] > 3]
    assert len(late) == 3
    assert largest_difference(late, whole[3:]) <= TOLERANCE


def remove(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.feature("Trainer", "`ignore_data_skip`")
def test_resumed_without_skipping_data(tmp_path: Path) -> None:
    (whole, *_) = run_user_code(first_half, tmp_path, 3, 2)
    remove(tmp_path / "checkpoint-6")
    more = {"ignore_data_skip": True}
    for resumed, steps in run_user_code(second_half, tmp_path, 3, 2, more):
        late = [row for row in resumed if row["step"] > 3]
        assert steps == 6
        assert [row["learning_rate"] for row in late] == [row["learning_rate"] for row in whole[3:]]
        assert late[0]["loss"] != whole[3]["loss"]  # the first samples again


class Noted(Sentences):
    """Which samples were asked for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.asked: list[int] = []

    def __getitem__(self, index: int) -> Any:
        self.asked.append(index)
        return super().__getitem__(index)


def with_other_batches(folder: Path) -> list[tuple[int, list[str]]]:
    """How many samples of an epoch were seen twice, and what was told, after four steps of four samples."""
    found, seen = [], []
    for accumulation, more in ((2, {}), (2, {}), (1, {}), (1, {"ignore_data_skip": True})):
        data = Noted(24, seed=1)
        trainer = make_trainer(
            folder / "run",
            config(1),
            trainer_arguments={"train_dataset": data},
            gradient_accumulation_steps=accumulation,
            **{"max_steps": -1, "num_train_epochs": 1, "save_strategy": "steps", "save_steps": 4, **more},
        )
        with logged() as lines:
            trainer.train(resume_from_checkpoint=str(folder / "run" / "checkpoint-4") if seen else None)
        found.append((len({*seen} & {*data.asked}), [line for line in lines if "samples are seen" in line]))
        seen = seen or data.asked[:16]
    return found


def test_a_resumed_run_with_another_batch_is_told_of_samples_seen_twice(tmp_path: Path) -> None:
    """transformers counts steps, and says nothing of it."""
    (((_, first), same, other, (_, anew)),) = run_user_code(with_other_batches, tmp_path, world_size=1)
    assert same == (0, [])
    assert first == anew == []
    assert other[0] == 8
    assert len(other[1]) == 1
    assert "4 steps took 16 samples, and the Trainer passes over 8" in other[1][0]


def without_a_checkpoint(folder: Path) -> str:
    trainer = make_trainer(folder, config(2), save_only_model=True, **SAVING)
    trainer.train()
    try:
        trainer.train(resume_from_checkpoint=True)
    except ValueError as error:
        return str(error)
    return "trained"


@pytest.mark.slow
def test_weights_alone_are_no_checkpoint_to_resume_from(tmp_path: Path) -> None:
    for message in run_user_code(without_a_checkpoint, tmp_path):
        assert "valid checkpoint" in message


# -- without an engine --------------------------------------------------------------------------------------------


def saved_before_training(folder: Path) -> bool:
    """Without DeepSpeed; then whole weights, and weights that were sharded as they were loaded."""
    make_trainer(folder).save_model(str(folder / "plain"))
    torch.distributed.barrier()
    make_trainer(folder, config(2)).save_model(str(folder / "stage2"))
    args = arguments(folder, config(3))
    model = AutoModelForCausalLM.from_pretrained(folder / "plain")
    trainer = Trainer(model=model, args=args, train_dataset=Sentences(60, seed=1))
    trainer.save_model(str(folder / "stage3"))
    trainer.train()
    return bool(model.lm_head.weight.ds_shape == (128, 32)) and trainer.state.global_step == 4


@pytest.mark.slow
@pytest.mark.feature("Trainer", "`save_model` before `train`")
def test_model_is_saved_before_it_is_trained(tmp_path: Path) -> None:
    assert run_user_code(saved_before_training, tmp_path) == [True] * WORLD
    plain, *ours = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "stage2", "stage3"))
    assert sorted(path.name for path in (tmp_path / "stage3").iterdir()) == sorted(
        path.name for path in (tmp_path / "plain").iterdir()
    )
    for weights in ours:
        assert weights.keys() == plain.keys()
        assert all(torch.equal(weights[name], plain[name]) for name in plain)


def saved_by_the_model(folder: Path, stage: int) -> Any:
    trainer = make_trainer(folder, config(stage), save_strategy="no", max_steps=2)

    def save_alone(output_dir: str, state_dict: Any = None) -> None:
        trainer.model.save_pretrained(output_dir)  # as sentence-transformers does: what was given is dropped

    trainer._save = save_alone
    trainer.train()
    trainer.save_model(str(folder / "alone"))
    whole = trainer.accelerator.get_state_dict(trainer.deepspeed)
    assert trainer._save is save_alone
    return whole if trainer.is_world_process_zero() else None


@pytest.mark.feature("Trainer", "a library's `_save` that drops the weights it is given, stage 3", pain="P19")
def test_a_library_that_lets_the_model_save_itself_writes_whole_weights(tmp_path: Path) -> None:
    whole, _ = run_user_code(saved_by_the_model, tmp_path, 3)
    saved = load_file(tmp_path / "alone" / "model.safetensors")
    assert set(saved) <= set(whole)
    assert all(torch.equal(value, whole[name].to(value.dtype)) for name, value in saved.items())
    assert sum(value.numel() for value in saved.values()) > 1000
