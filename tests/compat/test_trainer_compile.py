"""``torch_compile=True``: each block compiled, no graph break, the numbers of the Trainer without DeepSpeed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_hf.engine.modules.compiling import CompileReport
from tests.compat.common import run_user_code
from tests.compat.trainer_code import STAGES, TOLERANCE, assert_equal_histories, config, fit, history, make_trainer

TF32 = 1e-3  # torch_compile=True lets the Trainer multiply fp32 matrices in TF32 on a GPU
REGIONAL = "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"
CHECKPOINTED = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}


def compiled(
    folder: Path, backend: str, regional: bool, stages: list[int], more: dict[str, Any]
) -> tuple[Any, list[CompileReport]]:
    """Histories without DeepSpeed or compilation and with both at ``stages``, and what was compiled."""
    plain, by_stage, reports = fit(folder, **more), {}, []
    for stage in stages:
        torch._dynamo.reset()
        os.environ[REGIONAL] = str(regional)
        trainer = make_trainer(folder, config(stage), torch_compile=True, torch_compile_backend=backend, **more)
        trainer.train()
        by_stage[stage] = history(trainer)
        reports.append(trainer.model_wrapped.compile_report())
        trainer.model_wrapped.destroy()
    return (plain, by_stage), reports


@pytest.mark.feature("Trainer", "`torch_compile`: blocks at every stage, without graph breaks", pain="P37")
@pytest.mark.parametrize(
    ("regional", "more"),
    [
        pytest.param(False, {}, id="whole", marks=pytest.mark.slow),
        pytest.param(True, {}, id="regional", marks=pytest.mark.slow),
        pytest.param(False, CHECKPOINTED, id="checkpointing", marks=pytest.mark.slow),
    ],
)
def test_numbers_at_every_stage(regional: bool, more: dict[str, Any], tmp_path: Path) -> None:
    # aot_eager captures and differentiates as inductor does, and compiles in no time
    for result, reports in run_user_code(compiled, tmp_path, "aot_eager", regional, list(STAGES), more, timeout=110):
        assert_equal_histories(result, TF32 if torch.cuda.is_available() else TOLERANCE)
        for report in reports:
            assert report.breaks == {}
            assert report.modules >= 2
            assert report.graphs <= report.modules + 1, "blocks share their graphs"


@pytest.mark.slow
@pytest.mark.feature("Trainer", "`torch_compile` with inductor")
@pytest.mark.timeout(400)
def test_inductor(tmp_path: Path) -> None:
    for result, reports in run_user_code(compiled, tmp_path, "inductor", False, [2, 3], {}, timeout=380):
        assert_equal_histories(result, TF32 if torch.cuda.is_available() else 2e-4)
        assert all(report.modules == 2 and not report.breaks for report in reports)
