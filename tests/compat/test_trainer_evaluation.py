"""Evaluation and prediction: before, between, after and without training, at every stage."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
)

from tests.compat.common import largest_difference, run_user_code
from tests.compat.scripts.trainer_script import Sentences
from tests.compat.trainer_code import (
    ARGUMENTS,
    PLAIN_ARGUMENTS,
    STAGES,
    TOLERANCE,
    assert_equal_histories,
    config,
    histories,
    history,
    make_trainer,
    start_afresh,
)
from tests.helpers.logs import Lines


def accuracy(prediction: Any) -> dict[str, float]:
    """Share of the next tokens that are right: sees the whole predictions of all ranks."""
    guessed, labels = prediction.predictions.argmax(-1)[:, :-1], prediction.label_ids[:, 1:]
    counted = labels != -100
    return {"accuracy": float((guessed == labels)[counted].mean()), "rows": float(len(labels))}


@pytest.mark.feature(
    "Trainer", "`eval_on_start`, evaluation between steps, `eval_accumulation_steps`, `compute_metrics`"
)
def test_evaluation_between_steps(tmp_path: Path) -> None:
    more = {
        "eval_on_start": True,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "eval_accumulation_steps": 1,
        "per_device_eval_batch_size": 2,
        "trainer_arguments": {"compute_metrics": accuracy},
    }
    for result in run_user_code(histories, tmp_path, STAGES, more):
        assert_equal_histories(result)
        assert [row["step"] for row in result[0] if "eval_loss" in row] == [0, 2, 4]


def without_training(folder: Path) -> Any:
    def run(deepspeed: Any) -> Any:
        trainer = make_trainer(folder, deepspeed, trainer_arguments={"compute_metrics": accuracy})
        metrics = trainer.evaluate()
        predicted = trainer.predict(Sentences(7, seed=5))
        return metrics["eval_loss"], metrics["eval_accuracy"], metrics["eval_rows"], predicted.predictions

    named = {"type": "AdamW", "params": {"lr": "auto"}}
    return run(None), [run(config(stage, **more)) for stage in STAGES for more in ({}, {"optimizer": named})]


@pytest.mark.slow
@pytest.mark.feature("Trainer", "`evaluate` and `predict` without training, at every stage", pain="P36")
def test_evaluation_without_training(tmp_path: Path) -> None:
    for plain, ours in run_user_code(without_training, tmp_path):
        assert plain[2] == 12
        for loss, right, rows, predictions in ours:
            assert loss == pytest.approx(plain[0], abs=TOLERANCE)
            assert (right, rows) == plain[1:3]
            np.testing.assert_allclose(predictions, plain[3], atol=1e-5)


def again_and_again(folder: Path, stage: int) -> Any:
    """evaluate, train, evaluate, train on one Trainer; beside one that only trains."""
    named = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": 0.3}}
    only = make_trainer(folder, config(stage, optimizer=named), weight_decay=0.3)
    only.train()
    trainer = make_trainer(folder, config(stage, optimizer=named), weight_decay=0.3)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    first = history(trainer)
    between = trainer.evaluate()["eval_loss"]
    lines = Lines(logging.WARNING)
    logging.getLogger("ds_hf").addHandler(lines)
    trainer.train()
    second = [row for row in history(trainer) if "loss" in row]
    evaluations = (before, between, trainer.evaluate()["eval_loss"])
    return history(only), first, evaluations, second, [text for text in lines.texts if "new optimizer" in text]


@pytest.mark.feature("Trainer", "`evaluate` before `train`, and `train` again, on one Trainer")
@pytest.mark.parametrize("stage", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_one_trainer_evaluates_and_trains_again(stage: int, tmp_path: Path) -> None:
    for rank, (only, first, evaluations, second, told) in enumerate(run_user_code(again_and_again, tmp_path, stage)):
        assert first[-len(only) :] == only  # the optimizer of the JSON is there again after the evaluation
        assert evaluations[0] > evaluations[1] > evaluations[2]
        assert second[0]["loss"] < only[0]["loss"]
        assert len(told) == (rank == 0)  # its moments begin anew, which those of the Trainer alone do not


# -- Seq2SeqTrainer -----------------------------------------------------------------------------------------------


class Echoes(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences to be repeated."""

    def __init__(self, count: int, seed: int) -> None:
        self.tokens = torch.randint(3, 64, (count, 8), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def tiny_t5() -> PreTrainedModel:
    torch.manual_seed(0)
    settings = T5Config(
        d_model=32,
        d_ff=64,
        d_kv=8,
        num_layers=2,
        num_heads=4,
        vocab_size=64,
        decoder_start_token_id=0,
        dropout_rate=0.0,
    )
    return T5ForConditionalGeneration(settings)


def sequence_to_sequence(folder: Path) -> Any:
    def run(deepspeed: Any) -> Any:
        start_afresh()
        place = PLAIN_ARGUMENTS if deepspeed is None else {"deepspeed": deepspeed}
        generation = {
            "predict_with_generate": True,
            "generation_config": GenerationConfig(max_new_tokens=6, num_beams=2, decoder_start_token_id=0),
        }
        evaluation = {"eval_strategy": "steps", "eval_steps": 2}
        args = Seq2SeqTrainingArguments(output_dir=str(folder), **{**ARGUMENTS, **place, **generation, **evaluation})
        trainer = Seq2SeqTrainer(
            model=tiny_t5(),
            args=args,
            train_dataset=Echoes(40, seed=1),
            eval_dataset=Echoes(10, seed=2),
            compute_metrics=lambda p: {"tokens": float(p.predictions.shape[1]), "sum": float(p.predictions.sum())},
        )
        trainer.train()
        told = [(row["eval_tokens"], row["eval_sum"]) for row in trainer.state.log_history if "eval_sum" in row]
        return history(trainer), told, trainer.predict(Echoes(5, seed=3)).predictions

    return run(None), {stage: run(config(stage)) for stage in (0, 2, 3)}


@pytest.mark.feature("Trainer", "`Seq2SeqTrainer` with `predict_with_generate`", pain="P11")
def test_seq2seq_trainer_generates(tmp_path: Path) -> None:
    for plain, ours in run_user_code(sequence_to_sequence, tmp_path):
        for logged, told, predicted in ours.values():
            assert largest_difference(logged, plain[0]) <= TOLERANCE
            assert told == plain[1]
            np.testing.assert_array_equal(predicted, plain[2])
