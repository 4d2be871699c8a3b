"""The figures of ``StepReportCallback`` in the Trainer's own log."""

from __future__ import annotations

import contextlib
import json
import math
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st
from torch import nn
from transformers import Trainer, TrainingArguments

from ds_hf.errors import ConfigError
from ds_hf.hf.step_report import StepReportCallback
from tests.helpers.mutations import QUICK, examples, wrong_file


class Slow(nn.Module):
    """Sleeps, so that its speed is known."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        time.sleep(0.05)
        return {"loss": (self.weight - x.float().mean()) ** 2}


def test_figures_in_the_log(tmp_path: Path) -> None:
    (tmp_path / "ds_config.tuned.reasons.json").write_text(json.dumps({"metric": "throughput", "value": 100.0}))
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=6, logging_steps=3, per_device_train_batch_size=2, report_to="none",
        use_cpu=True, disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    data = [{"x": torch.ones(2)} for _ in range(32)]
    trainer = Trainer(Slow(), arguments, train_dataset=data, callbacks=[StepReportCallback(tmp_path)])
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logs) == 2
    for entry in logs:
        assert entry["step_seconds_low"] <= entry["step_seconds"] <= entry["step_seconds_high"]
        assert entry["step_seconds"] >= 0.05
        assert entry["samples_per_second"] == pytest.approx(2 / entry["step_seconds"])
        assert entry["against_autotuned"] == pytest.approx(entry["samples_per_second"] / 100)
        assert entry["peak_memory"] > 1e6


def test_processes_that_share_a_model_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_hf.deepspeed_api.groups.get_data_parallel_world_size", lambda: 2)
    args = SimpleNamespace(train_batch_size=3, gradient_accumulation_steps=4, world_size=8, deepspeed_plugin=object())
    callback, state, logs = StepReportCallback(), SimpleNamespace(log_history=[]), {"loss": 1.0}
    for _ in range(3):
        callback.on_step_end(args, state, None)
    callback.on_log(args, state, None, logs)
    assert logs["samples_per_second"] == pytest.approx(3 * 4 * 2 / logs["step_seconds"])


@given(data=st.data())
@examples(QUICK)
def test_the_folder_of_a_search_may_hold_something_else(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "ds_config.tuned.reasons.json")
        path.write_text('{"metric": "throughput", "value": 12.5}')
        assert StepReportCallback(name).expected == 12.5
        note(data.draw(wrong_file(path)))
        with contextlib.suppress(ConfigError):
            expected = StepReportCallback(name).expected
            assert expected is None or 0 < expected < math.inf
