"""The unmodified Trainer script on CUDA devices under NCCL, against the Trainer without DeepSpeed on the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.compat.common import AUTO_BATCH, largest_difference, save_tiny_model, steps, write_json
from tests.compat.test_trainer import MAX_STEPS, SAVE_STEPS, Run, run, zero_section

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

WORLD = min(torch.cuda.device_count(), 2) or 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(model, tmp_path_factory.mktemp("reference"), world_size=WORLD)


def config(folder: Path, stage: int, **more: Any) -> str:
    content = {**AUTO_BATCH, "zero_optimization": zero_section(stage), **more}
    return f"--deepspeed={write_json(folder / 'ds.json', content)}"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fp32_equals_the_trainer_without_deepspeed(stage: int, model: Path, reference: Run, tmp_path: Path) -> None:
    ours = run(model, tmp_path, config(tmp_path, stage), world_size=WORLD)
    assert ours.report["world_size"] == WORLD
    assert largest_difference(steps(ours.report), steps(reference.report)) <= 2e-5
    expected = reference.weights()
    for name, weight in ours.weights().items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stage", [2, 3])
def test_bf16_follows_fp32_and_resumes_exactly(stage: int, model: Path, reference: Run, tmp_path: Path) -> None:
    arguments = [config(tmp_path, stage, bf16={"enabled": "auto"}), "--bf16"]
    ours = run(model, tmp_path, *arguments, world_size=WORLD)
    for row, expected in zip(steps(ours.report), steps(reference.report), strict=True):
        for key in ("loss", "eval_loss"):
            if key in row:
                assert row[key] == pytest.approx(expected[key], rel=1e-2)
    again = tmp_path / "again"
    again.mkdir()
    checkpoint = f"--resume_from_checkpoint={ours.output}/checkpoint-{SAVE_STEPS}"
    resumed = run(model, again, *arguments, checkpoint, world_size=WORLD)
    late = [row for row in steps(ours.report) if row["step"] > SAVE_STEPS]
    assert len(late) >= MAX_STEPS - SAVE_STEPS
    assert [row for row in steps(resumed.report) if row["step"] > SAVE_STEPS] == late
