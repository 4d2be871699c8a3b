"""``--optim`` values that an engine cannot serve are refused before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import TrainingArguments

from ds_hf.errors import ConfigError
from ds_hf.hf.optimizers import find_unfit_optimizers
from ds_hf.hf.source import checked_config
from tests.compat.common import AUTO_BATCH

ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}


def faults(folder: Path, optim: str, stage: int, **more: object) -> list[str]:
    deepspeed = {**AUTO_BATCH, "zero_optimization": {"stage": stage}, **more}
    targets = ["mlp"] if "_" in optim and not optim.startswith("adamw") else None
    try:
        TrainingArguments(str(folder), report_to="none", optim=optim, optim_target_modules=targets, deepspeed=deepspeed)
    except ConfigError as error:
        return [str(fault) for fault in error.faults]
    return []


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("optim", ["lomo", "adalomo", "galore_adamw_layerwise", "apollo_adamw_layerwise"])
def test_updates_inside_backward_are_refused(optim: str, stage: int, tmp_path: Path) -> None:
    (fault,) = faults(tmp_path, optim, stage)
    assert f"--optim {optim} updates each parameter inside backward" in fault
    assert "take another --optim" in fault


def test_under_accelerate_launch_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ConfigError, match="--optim lomo updates each parameter inside backward"):
        TrainingArguments(str(tmp_path), report_to="none", optim="lomo")


@pytest.mark.parametrize("optim", ["galore_adamw", "galore_adafactor", "apollo_adamw"])
def test_low_rank_projections_need_whole_matrices(optim: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for stage in (1, 2, 3):
        (fault,) = faults(tmp_path, optim, stage)
        assert fault.startswith(f"/zero_optimization/stage: --optim {optim} projects whole gradient matrices")
        assert "use stage 0, or another --optim" in fault


def test_what_can_train_is_let_through(tmp_path: Path) -> None:
    assert faults(tmp_path, "galore_adamw", 3) == []  # one process has whole matrices
    assert faults(tmp_path, "adamw_torch", 3) == []


def test_the_optimizer_of_the_file_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = checked_config({**AUTO_BATCH, "zero_optimization": {"stage": 3}, **ADAMW})
    assert find_unfit_optimizers(config, SimpleNamespace(optim="galore_adamw")) == []
