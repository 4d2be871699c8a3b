"""A Trainer whose DeepSpeed file switches a monitor on: what the engine writes is what the Trainer logs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.compat.common import run_user_code
from tests.compat.trainer_code import config, make_trainer
from tests.engine.observe.monitor.common import LOSS, LR, rows

STEPS, BATCH, ACCUMULATION = 4, 2, 2


def fit_and_resume(folder: Path, stage: int) -> list[dict[str, Any]]:
    """Half of the steps, and the rest by another Trainer from the checkpoint; what they logged."""
    monitor = {"enabled": True, "output_path": str(folder), "job_name": "run"}
    settings: dict[str, Any] = {
        "gradient_accumulation_steps": ACCUMULATION,
        "max_steps": STEPS,
        "save_strategy": "steps",
        "save_steps": STEPS // 2,
        "warmup_steps": 3,
    }
    logged = []
    for resume in (None, folder / "out" / f"checkpoint-{STEPS // 2}"):
        trainer = make_trainer(folder / "out", config(stage, csv_monitor=monitor), **settings)
        if resume is None:
            trainer.args.max_steps = STEPS // 2
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        logged = [row for row in trainer.state.log_history if "learning_rate" in row]
    return logged


@pytest.mark.feature("Trainer", "`csv_monitor` and the other monitors of the file; a resumed run goes on in its files")
@pytest.mark.parametrize(("world_size", "stage"), [(1, 1), pytest.param(2, 3, marks=pytest.mark.slow)])
def test_the_file_of_a_monitor_has_the_numbers_of_the_trainer(world_size: int, stage: int, tmp_path: Path) -> None:
    logged = run_user_code(fit_and_resume, tmp_path, stage, world_size=world_size)[0]
    assert [row["step"] for row in logged] == list(range(1, STEPS + 1))
    samples = [step * BATCH * ACCUMULATION * world_size for step in range(1, STEPS + 1)]
    rates, losses = rows(tmp_path / "run" / LR), rows(tmp_path / "run" / LOSS)
    assert [x for x, _ in rates] == [x for x, _ in losses] == samples
    assert [rate for _, rate in rates] == pytest.approx([row["learning_rate"] for row in logged], rel=1e-6)
    if world_size == 1:  # with more, the Trainer logs the mean over ranks, and the engine the loss of rank 0
        assert [loss for _, loss in losses] == pytest.approx([row["loss"] for row in logged], abs=1e-4)
