"""The figure and the summary of a result."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from ds_hf.autotune.lr import figure, summary
from ds_hf.lr import Decision, Landmarks, LrResult, PlannedRun, RunResult, Sweep


def result(**changes: Any) -> LrResult:
    rates = tuple(10 ** (-5 + 0.1 * k) for k in range(50))
    sweeps = tuple(
        Sweep(seed, rates, (*(4 - 0.05 * k + 0.01 * seed for k in range(49)), math.inf), rates[::5],
              tuple(4 - 0.05 * k for k in range(0, 50, 5)), diverged_at=rates[-1])
        for seed in (0, 1)
    )  # fmt: skip
    runs = (
        RunResult(PlannedRun(0.1, 50, 0), math.inf),
        RunResult(PlannedRun(0.01, 50, 0), 1.25),
        RunResult(PlannedRun(0.01, 100, 0), 1.1),
        RunResult(PlannedRun(0.01, 100, 1), 1.2),
    )
    marks = Landmarks(1e-4, 1e-2, 0.1, True, None, 2e-3, 1.5)
    measured = {"sweeps": sweeps, "runs": runs, "optimizer": "AdamW", "cycles_momentum": True, "total_steps": 200}
    return LrResult.of(marks, Decision(0.0123, 0.01, 0.03, "why"), updates=9, seconds=2.0, **{**measured, **changes})


def test_the_figure_has_curves_interval_and_suggestion() -> None:
    made = json.loads(figure(result()).to_json())
    names = [trace.get("name") for trace in made["data"]]
    assert names == ["training, order 0", "held-out, each order", "training, order 1", "held-out, each order",
                     "held-out, mean and smoothed", "50 updates", "100 updates"]  # fmt: skip
    bands = [shape for shape in made["layout"]["shapes"] if shape["type"] == "rect"]
    assert [(band["x0"], band["x1"]) for band in bands] == [(1e-4, 0.1)] * 2
    lines = [shape["x0"] for shape in made["layout"]["shapes"] if shape["type"] == "line"]
    assert lines.count(0.0123) == 2
    assert {2e-3, 0.1} <= set(lines)  # valley and limit; steepest found nothing
    assert made["layout"]["xaxis"]["type"] == "log"
    assert made["data"][5]["marker"]["symbol"] == ["circle", "x"]


def test_a_range_test_alone_has_one_panel() -> None:
    made = json.loads(figure(result(runs=())).to_json())
    assert "xaxis2" not in made["layout"]


def test_the_summary_says_what_to_do() -> None:
    text = summary(result())
    assert text.splitlines()[0] == "learning rate  0.0123"
    assert "interval       0.0001 to 0.1" in text
    assert "0.1     50 updates x 1  diverged" in text
    assert "0.01    100 updates x 2  1.1500  <- lowest" in text
    assert "--learning_rate 0.0123 --lr_scheduler_type cosine --warmup_steps 12" in text
    assert '"cycle_max_lr": 0.0123' in text


@pytest.mark.parametrize("total", [None, 100])
def test_without_a_length_it_asks_for_one(total: int | None) -> None:
    assert ("with --total-steps N" in summary(result(total_steps=total))) is (total is None)
