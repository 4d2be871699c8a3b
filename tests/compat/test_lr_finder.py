"""``LrFinderCallback``: the search leaves a Trainer's training as it was, but for the rate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds_hf.errors import DsHfError
from ds_hf.hf import LrFinderCallback
from ds_hf.lr import LrResult
from tests.compat.trainer_code import config, history, make_trainer
from tests.helpers.distributed import run_distributed

SMALL: dict[str, Any] = {
    "num_steps": 16, "seeds": 1, "confirm_steps": 4, "moment_steps": 1, "train_batches": 5, "held_out_batches": 2,
}  # fmt: skip
MORE: dict[str, Any] = {"warmup_steps": 2, "max_steps": 5, "gradient_accumulation_steps": 2}


def _fits(folder: Path, stage: int) -> Any:
    """Logs without a search, with one that is not applied, and the applied one's with its result."""
    logs, result = [], None
    for apply in (None, False, True):
        trainer = make_trainer(folder, config(stage), **MORE)
        if apply is not None:
            callback = LrFinderCallback(trainer, apply=apply, **SMALL)
            trainer.add_callback(callback)
        trainer.train()
        logs.append(history(trainer))
    result = callback.result
    assert result is not None
    trainer.deepspeed.destroy()
    return logs, result.to_dict(), json.loads((folder / "lr_result.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_training_is_the_same_but_for_the_rate(stage: int, tmp_path: Path) -> None:
    ((plain, unapplied, applied), values, written) = run_distributed(_fits, 1, tmp_path, stage, backend=None)[0]
    assert unapplied == plain
    assert written == values
    result = LrResult.from_dict(values)
    assert result.total_steps == 5
    rates = [row["learning_rate"] for row in plain]
    factor = result.lr / 5e-3
    assert [row["learning_rate"] for row in applied] == pytest.approx([rate * factor for rate in rates])
    assert applied[0]["loss"] == pytest.approx(plain[0]["loss"])  # the first update of the warm-up is at 0


def _schedule_in_the_file(folder: Path) -> Any:
    schedule = {"type": "WarmupDecayLR", "params": {
        "warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 2, "total_num_steps": 5}}  # fmt: skip
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
    content = config(2, scheduler=schedule, optimizer=optimizer)
    trainer = make_trainer(folder, content, **{**MORE, "learning_rate": 1e-3, "warmup_steps": 2})
    callback = LrFinderCallback(trainer, **SMALL)
    trainer.add_callback(callback)
    trainer.train()
    assert callback.result is not None
    return callback.result.lr, trainer.deepspeed.lr_scheduler.max_lrs, trainer.args.learning_rate


def test_a_schedule_of_the_file_is_scaled(tmp_path: Path) -> None:
    lr, peaks, argument = run_distributed(_schedule_in_the_file, 1, tmp_path, backend=None)[0]
    assert peaks == pytest.approx([lr])
    assert argument == lr


def _without_an_engine(folder: Path) -> None:
    trainer = make_trainer(folder)
    trainer.add_callback(LrFinderCallback(trainer))
    with pytest.raises(DsHfError, match="train with --deepspeed"):
        trainer.train()


def test_it_needs_an_engine(tmp_path: Path) -> None:
    run_distributed(_without_an_engine, 1, tmp_path, backend=None)
