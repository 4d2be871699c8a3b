"""A Trainer whose DeepSpeed file asks for a report: its logs have the figures, and its end says where the time went."""

from __future__ import annotations

import contextlib
import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from ds_hf.engine.observe.report.feed import NAMES
from ds_hf.profile.load import read_run
from tests.compat.common import run_user_code
from tests.compat.trainer_code import config, make_trainer
from tests.helpers.logs import Lines


def fit(folder: Path) -> tuple[list[dict[str, Any]], str]:
    section = {"report": str(folder / "report"), "report_steps": "all"}
    csv = {"enabled": True, "output_path": str(folder), "job_name": "run"}
    own = folder / "own.json"
    own.write_text(json.dumps(config(2, ds_hf=section, csv_monitor=csv)))
    trainer = make_trainer(folder / "out", str(own), max_steps=6, logging_steps=2)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        trainer.train()
    return [row for row in trainer.state.log_history if "loss" in row], printed.getvalue()


@pytest.mark.feature("Trainer", "`ds_hf.report`: step times in the logs, and a paragraph on where the time went")
def test_logs_and_the_closing_paragraph(tmp_path: Path) -> None:
    ((logged, printed),) = run_user_code(fit, tmp_path, world_size=1)
    assert len(logged) == 3
    for row in logged:
        assert all(row[name] > 0 for name in ("compute_ms", "update_ms", "loader_wait_ms", "outside_ms"))
        assert sum(row.get(name, 0.0) for name in NAMES.values()) == pytest.approx(row["step_ms"], rel=1e-3)
        assert row["tokens_per_second"] > 0
        assert 0 < row["mfu"] < 1
    assert printed.count("where the time went (steps 3 to 6, 4 of them recorded):") == 1
    assert f"report: {tmp_path / 'report' / 'report.html'}" in printed
    written = (tmp_path / "run" / "Train_Step_step_ms.csv").read_text().splitlines()
    assert len(written) == 7
    run = read_run(tmp_path / "report")
    assert run.written == json.loads((tmp_path / "own.json").read_text()), "with each auto"
    assert run.header["config"]["train_micro_batch_size_per_gpu"] == 2
    assert run.header["source"] == str(tmp_path / "own.json")


def introduced(folder: Path, level: str) -> list[str]:
    lines = Lines()
    logging.getLogger("ds_hf").addHandler(lines)
    own = folder / "own.json"
    own.write_text(json.dumps(config(2)))
    trainer = make_trainer(folder / "out", str(own), max_steps=1, log_level=level)
    trainer.train()
    assert str(trainer.deepspeed.summary()).startswith("ds_hf ")
    return [text for text in lines.texts if text == str(trainer.deepspeed.summary())]


@pytest.mark.parametrize(("level", "lines"), [("passive", 1), ("info", 1), ("error", 0)])
@pytest.mark.feature("Trainer", "a run's first line, and `log_level` of TrainingArguments")
def test_first_line(tmp_path: Path, level: str, lines: int) -> None:
    ((found),) = run_user_code(introduced, tmp_path, level, world_size=1)
    assert len(found) == lines
