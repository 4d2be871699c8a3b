"""Loss scalers: DeepSpeed's scales boundary by boundary, resuming, and the error at the minimum."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_hf.engine.optim.loss_scaler import (
    DynamicLossScaler,
    LossScaler,
    NoLossScaler,
    StaticLossScaler,
    build_loss_scaler,
)
from ds_hf.errors import LossScaleError

TRACES = json.loads((Path(__file__).parents[2] / "data" / "loss_scale_traces.json").read_text())
CASES = TRACES["cases"]


def config(**fp16: Any) -> SimpleNamespace:
    defaults = {
        "enabled": True,
        "loss_scale": 0,
        "initial_scale_power": 16,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "consecutive_hysteresis": False,
        "min_loss_scale": 1,
    }
    return SimpleNamespace(fp16=SimpleNamespace(**{**defaults, **fp16}))


def from_case(case: dict[str, Any], **more: Any) -> LossScaler:
    keys = ("initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis", "min_loss_scale")
    return build_loss_scaler(config(**{key: case[key] for key in keys}), **more)


def test_dynamic_scales_equal_deepspeeds() -> None:
    raised = 0
    for case in CASES:
        scaler = from_case(case)
        for boundary, expected in enumerate(case["scales"]):
            scaler.update(case["overflows"][boundary] == "1")
            assert scaler.scale == expected, (case, boundary)
        if case["raised"]:
            raised += 1
            with pytest.raises(LossScaleError):
                scaler.update(True)
    assert len(CASES) > 100
    assert raised > 10


def test_without_zero_every_overflow_halves_the_scale() -> None:
    for case in TRACES["stage0"]:
        scaler = from_case(case, sharded=False)
        for boundary, expected in enumerate(case["scales"]):
            scaler.update(case["overflows"][boundary] == "1")
            assert scaler.scale == expected, (case, boundary)
    assert {case["hysteresis"] for case in TRACES["stage0"]} == {1, 2, 3}
    assert {case["consecutive_hysteresis"] for case in TRACES["stage0"]} == {True, False}


def test_autocast_to_fp16_scales_as_torch() -> None:
    """The kernel of torch's GradScaler is asked what it does with its defaults; growth comes one step later here."""
    off = config(enabled=False)
    assert isinstance(build_loss_scaler(off), NoLossScaler)
    assert isinstance(build_loss_scaler(off, autocast="bfloat16"), NoLossScaler)
    scaler = build_loss_scaler(off, autocast="float16")
    scale, tracker = torch.tensor(65536.0), torch.tensor(0, dtype=torch.int32)
    mine, theirs = [], []
    for step in range(4500):
        overflow = step in (0, 1, 7, 4400)
        torch._amp_update_scale_(scale, tracker, torch.tensor(float(overflow)), 2.0, 0.5, 2000)
        scaler.update(overflow)
        theirs.append(float(scale))
        mine.append(scaler.scale)
    apart = [step for step in range(4500) if mine[step] != theirs[step]]
    assert apart == [7 + 2000, 7 + 4000]
    assert mine[-1] == theirs[-1] == 2.0**14
    for _ in range(30):
        scaler.update(True)  # no smallest scale that would end the run
    assert scaler.scale == 2.0**-16


def test_a_resumed_scaler_continues() -> None:
    for case in CASES:
        half = len(case["scales"]) // 2
        first = from_case(case)
        for mark in case["overflows"][:half]:
            first.update(mark == "1")
        second = from_case(case)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        for mark, expected in zip(case["overflows"][half:], case["scales"][half:], strict=False):
            second.update(mark == "1")
            assert second.scale == expected


def test_error_at_the_minimum_says_what_to_do() -> None:
    scaler = DynamicLossScaler(initial_scale=2.0, hysteresis=1, min_loss_scale=1)
    scaler.update(True)
    assert scaler.scale == 1.0
    with pytest.raises(LossScaleError) as caught:
        scaler.update(True)
    message = str(caught.value)
    for word in ("fp16.min_loss_scale", "2 boundaries in a row", "bf16.enabled to true", "learning rate"):
        assert word in message


def test_static_and_absent_scales_never_move() -> None:
    for scaler, scale in ((StaticLossScaler(128), 128.0), (NoLossScaler(), 1.0)):
        assert scaler.dynamic is False
        for overflow in (True, True, False):
            scaler.update(overflow)
            assert scaler.scale == scale
        scaler.load_state_dict({"scale": 4.0})  # another run's scale: this run's configuration wins
        assert scaler.scale == scale


def test_built_from_the_configuration() -> None:
    assert type(build_loss_scaler(config(enabled=False))) is NoLossScaler
    static = build_loss_scaler(config(loss_scale=1024))
    assert type(static) is StaticLossScaler
    assert static.scale == 1024.0
    dynamic = build_loss_scaler(config())
    assert type(dynamic) is DynamicLossScaler
    assert dynamic.scale == 65536.0
    assert dynamic.dynamic
    dynamic.load_state_dict(static.state_dict())  # loss_scale changed from fixed to dynamic between runs
    assert dynamic.scale == 1024.0


def test_start_below_the_minimum_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr("ds_hf.engine.optim.loss_scaler.warn_once", told.append)
    build_loss_scaler(config(initial_scale_power=2, min_loss_scale=128))
    assert len(told) == 1
    assert "initial_scale_power" in told[0]


@pytest.mark.parametrize(
    "wrong", [{"loss_scale_window": 0}, {"min_loss_scale": 0}, {"hysteresis": 0}, {"initial_scale": -1.0}]
)
def test_wrong_values(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        DynamicLossScaler(**wrong)
    with pytest.raises(ValueError, match="loss_scale"):
        StaticLossScaler(-1)
