"""16-bit training under the Trainer: skipped steps in the logs, schedules that wait for them, dtypes that are told."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer

from tests.compat.common import run_user_code
from tests.compat.trainer_code import STAGES, config, fit, make_trainer

BAD = 2  # the step whose loss is not finite


class Overflowing(Trainer):
    """The loss of one micro-batch is infinite, on one rank."""

    seen = 0

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        self.seen += 1
        loss = super().compute_loss(*args, **kwargs)
        return loss * float("inf") if self.seen == BAD and self.args.process_index == 0 else loss


def overflow(folder: Path, kind: str, stage: int) -> Any:
    """Logs with the Trainer's schedule, and with one of the JSON that the engine steps."""
    precision = {kind: {"enabled": "auto"}}
    steps: dict[str, Any] = {"max_steps": 5, "warmup_steps": 10, "trainer_class": Overflowing, kind: True}
    params = {"warmup_min_lr": 0.0, "warmup_max_lr": 5e-3, "warmup_num_steps": 10, "warmup_type": "linear"}
    logs = []
    for scheduler in (None, {"type": "WarmupLR", "params": params}):
        more = {} if scheduler is None else {"scheduler": scheduler}
        trainer = make_trainer(folder, config(stage, **precision, **more), **steps)
        trainer.train()
        logs.append([row for row in trainer.state.log_history if "loss" in row])
    return logs


@pytest.mark.feature(
    "Trainer", "skipped steps are in the logs (`skipped_steps`), no schedule advances on them", pain="P24"
)
@pytest.mark.parametrize(
    ("kind", "stage"),
    [
        ("bf16", 2),
        pytest.param("fp16", 3, marks=pytest.mark.slow),
        pytest.param("bf16", 3, marks=pytest.mark.slow),
        pytest.param("fp16", 0, marks=pytest.mark.slow),
    ],
)
def test_skipped_steps_are_logged_and_schedules_wait(kind: str, stage: int, tmp_path: Path) -> None:
    for of_trainer, of_json in run_user_code(overflow, tmp_path, kind, stage):
        for logged in (of_trainer, of_json):
            assert [row.get("skipped_steps") for row in logged] == [None, 1, 1, 1, 1]
            assert [row["step"] for row in logged] == [1, 2, 3, 4, 5]
        # Logged before the Trainer steps its own schedule, and after the engine has stepped that of the JSON.
        assert [row["learning_rate"] for row in of_trainer] == pytest.approx([0.0, 5e-4, 5e-4, 1e-3, 1.5e-3])
        rates = [row["learning_rate"] for row in of_json]
        assert rates[BAD - 1] == rates[BAD - 2]
        assert rates[BAD:] == sorted(set(rates[BAD:]))
        assert rates[-1] > rates[BAD - 1]


def no_skips(folder: Path) -> Any:
    trainer = make_trainer(folder, config(2, bf16={"enabled": "auto"}), bf16=True)
    trainer.train()
    return trainer.state.log_history


@pytest.mark.slow
def test_logs_say_nothing_of_skips_where_there_are_none(tmp_path: Path) -> None:
    for logged in run_user_code(no_skips, tmp_path):
        assert all("skipped_steps" not in row for row in logged)


def followed(folder: Path) -> Any:
    def run(kind: str, stage: int) -> list[dict[str, float]]:
        return fit(folder, config(stage, **{kind: {"enabled": "auto"}}), **{kind: True})

    return fit(folder), [run(kind, stage) for kind in ("bf16", "fp16") for stage in STAGES]


@pytest.mark.feature("Trainer", "`--bf16`, `--fp16`")
def test_sixteen_bits_follow_fp32(tmp_path: Path) -> None:
    for plain, ours in run_user_code(followed, tmp_path):
        for logged in ours:
            for mine, reference in zip(logged, plain, strict=True):
                assert mine["loss"] == pytest.approx(reference["loss"], rel=0.01)
                assert mine["grad_norm"] == pytest.approx(reference["grad_norm"], rel=0.03)
                assert mine["loss"] != reference["loss"]


def told(folder: Path) -> list[str]:
    """What engines say of themselves when they are built: fp32, bf16, fp16, and bf16 summed in fp32."""
    texts = []
    variants: list[tuple[str | None, dict[str, Any]]] = [(None, {}), ("bf16", {}), ("fp16", {})]
    variants += [("bf16", {"communication_data_type": "fp32"})]
    for kind, more in variants:
        said = io.StringIO()
        handler = logging.StreamHandler(said)
        logging.getLogger("ds_hf").addHandler(handler)
        precision = {kind: {"enabled": "auto"}, **more} if kind else {}
        trainer = make_trainer(
            folder, config(3, **precision), log_level="info", max_steps=1, **({kind: True} if kind else {})
        )
        embedding: torch.Tensor = trainer.model.get_input_embeddings().weight
        embedding.requires_grad_(False)
        trainer.train()
        logging.getLogger("ds_hf").removeHandler(handler)
        texts.append(said.getvalue())
    return texts


@pytest.mark.slow
@pytest.mark.feature("Trainer", "dtypes of parameters, gradients, masters, moments are told at the start", pain="P26")
def test_precisions_are_told_once(tmp_path: Path) -> None:
    first, *others = run_user_code(told, tmp_path)
    for text, short, reduced in zip(
        first, ("fp32", "bf16", "fp16", "bf16"), ("fp32", "bf16", "fp16", "fp32"), strict=True
    ):
        expected = (
            f"precision: parameters {short}, frozen parameters {short}, gradients {short}, reduced in {reduced}, "
            "accumulated in fp32, master weights fp32, moments fp32"
        )
        assert text.count(expected) == 1
    assert all("precision" not in text for texts in others for text in texts)
