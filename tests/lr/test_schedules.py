"""Every schedule that is suggested is built and run, and every argument is parsed by transformers."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
import torch
from transformers import HfArgumentParser, TrainingArguments

from ds_hf.engine.optim.schedules.build import build_scheduler
from ds_hf.lr import Advice, Decision, Landmarks, LrResult, PlannedRun, RunResult, Sweep, advise

LR = 0.0123456
NAMES = ["WarmupDecayLR", "WarmupCosineLR", "WarmupLR", "OneCycle"]


def rates(advice: Advice, steps: int, kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> list[float]:
    """Learning rate of each update."""
    config = advice.config
    optimizer = kind([torch.nn.Parameter(torch.zeros(1))], **config["optimizer"]["params"])
    schedule = build_scheduler(config["scheduler"]["type"], config["scheduler"]["params"], optimizer, mode="strict")
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("steps", [20, 333])
def test_schedules_peak_at_the_suggestion(steps: int) -> None:
    found = {advice.name: advice for advice in advise(LR, steps, cycles_momentum=True)}
    assert list(found) == NAMES
    for name, advice in found.items():
        values = rates(advice, steps)
        assert max(values) == pytest.approx(0.0123, rel=1e-6), name
        peak = values.index(max(values))
        warm = 0.3 if name == "OneCycle" else 0.06
        assert peak == pytest.approx(warm * steps, abs=2)
    assert rates(found["OneCycle"], steps)[0] == pytest.approx(0.0123 / 25, rel=0.01)
    assert rates(found["WarmupDecayLR"], steps)[-1] < 0.1 * 0.0123


def test_momentum_only_where_there_are_betas() -> None:
    adam = advise(LR, 100, cycles_momentum=True)[-1].config["scheduler"]["params"]
    assert (adam["cycle_momentum"], adam["cycle_min_mom"], adam["cycle_max_mom"]) == (True, 0.85, 0.95)
    assert (adam["cycle_first_step_size"], adam["cycle_second_step_size"]) == (30, 70)
    sgd = advise(LR, 100, cycles_momentum=False)[-1]
    assert sgd.config["scheduler"]["params"]["cycle_momentum"] is False
    assert "cycle_min_mom" not in sgd.config["scheduler"]["params"]
    assert len(rates(sgd, 100, torch.optim.SGD)) == 100


def test_without_the_number_of_steps() -> None:
    found = advise(LR, None, cycles_momentum=True)
    assert [advice.name for advice in found] == NAMES[:3]
    assert found[0].config["scheduler"]["params"]["total_num_steps"] == "auto"


@pytest.mark.parametrize("steps", [None, 500])
def test_arguments_are_those_of_transformers(steps: int | None, tmp_path: Any) -> None:
    kinds = []
    for advice in advise(LR, steps, cycles_momentum=True):
        words = [*advice.arguments, "--output_dir", str(tmp_path), "--use_cpu", "True"]
        (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(words)
        assert args.learning_rate == 0.0123
        assert args.get_warmup_steps(500) == (150 if advice.name == "OneCycle" else 30)
        kinds.append(str(args.lr_scheduler_type.value))
    assert kinds[:3] == ["linear", "cosine", "constant_with_warmup"]


def test_result_as_json() -> None:
    marks = Landmarks(1e-4, 1e-2, 0.1, True, None, 2e-3, 1.5)
    runs = (RunResult(PlannedRun(0.1, 50, 0), math.inf), RunResult(PlannedRun(0.01, 50, 0), 1.25))
    sweep = Sweep(0, (1e-4, 1e-3), (2.0, 1.0), (1e-4,), (2.0,), (0.1, 0.2), 0, None)
    result = LrResult.of(
        marks, Decision(0.02, 0.01, 0.03, "why"), sweeps=(sweep,), runs=runs, optimizer="AdamW", cycles_momentum=True,
        total_steps=100, updates=12, seconds=1.5,
    )  # fmt: skip
    assert result.interval == (1e-4, 0.1)
    values = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert LrResult.from_dict(values) == result
    assert [schedule["name"] for schedule in values["schedules"]] == NAMES
    alone = LrResult.of(marks, None, **{f.name: getattr(result, f.name) for f in dataclasses.fields(result)[5:]})
    assert alone.lr == 1e-2
