"""The loop of DeepSpeed's getting-started page of 2020, run as written, against plain torch in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.compat.common import SCRIPTS, WORLD, read_json, run_python, write_json
from tests.compat.scripts import getting_started
from tests.helpers.interpreter import torchrun

SCRIPT = SCRIPTS / "getting_started.py"
STEPS = 8
# The page's own file, without its fp16.
PAGE: dict[str, Any] = {
    "train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 0.00015}},
    "zero_optimization": True,
}


def plain_torch(batch_size: int) -> list[float]:
    """Losses of the same model on the whole batch; DeepSpeed's "Adam" is AdamW unless told otherwise."""
    torch.manual_seed(7)
    model = getting_started.Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.00015, weight_decay=0.0)
    losses = []
    for batch in getting_started.make_loader(STEPS, batch_size, 0, 1):
        loss = model(batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def arguments(config: Path, report: Path, *more: str) -> list[str]:
    return ["--deepspeed", f"--deepspeed_config={config}", f"--report={report}", f"--steps={STEPS}", *more]


@pytest.mark.slow
def test_one_process_as_written_then_resumed(tmp_path: Path) -> None:
    config, report, saved = write_json(tmp_path / "ds.json", PAGE), tmp_path / "report.json", tmp_path / "saved"
    run_python(SCRIPT, *arguments(config, report, f"--save_dir={saved}"))
    whole = read_json(report)
    assert whole["losses"] == pytest.approx(plain_torch(8), abs=1e-6)
    assert len(whole["tags"]) == STEPS // 2
    assert {path.name for path in saved.iterdir() if path.is_dir()} == set(whole["tags"])

    first_tag = whole["tags"][0]  # saved after step 1, under the loss of that step
    run_python(SCRIPT, *arguments(config, report, f"--load_dir={saved}", f"--ckpt_id={first_tag}"))
    assert read_json(report)["losses"] == whole["losses"][2:]


@pytest.mark.feature("deepspeed names", "the loop of DeepSpeed's getting-started page, as written")
@pytest.mark.skipif(WORLD < 2, reason="needs two devices")
def test_two_processes_as_written_then_resumed(tmp_path: Path) -> None:
    config, report, saved = write_json(tmp_path / "ds.json", PAGE), tmp_path / "report.json", tmp_path / "saved"
    torchrun(SCRIPT, *arguments(config, report, f"--save_dir={saved}"))
    whole = read_json(report)
    first_half = plain_first_half()
    assert whole["losses"][0] == pytest.approx(first_half, abs=1e-6)  # rank 0 logs its own half of the batch

    tag = whole["tags"][-2]
    more = (f"--load_dir={saved}", f"--ckpt_id={tag}")
    torchrun(SCRIPT, *arguments(config, report, *more))
    assert read_json(report)["losses"] == whole["losses"][6:]


def plain_first_half() -> float:
    """Loss of rank 0's half of the first batch before any step."""
    torch.manual_seed(7)
    model = getting_started.Model()
    inputs, targets = getting_started.make_loader(STEPS, 8, 0, 1)[0]
    return float(model((inputs[:4], targets[:4])))
