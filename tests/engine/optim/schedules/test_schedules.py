"""LR schedules: every value of DeepSpeed's traces, the strict mode's promises, names and errors."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_hf.engine.optim.schedules.build import POLICIES, build_scheduler
from ds_hf.engine.optim.schedules.policies import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR
from ds_hf.errors import ConfigError

TRACES = Path(__file__).parents[3] / "data" / "lr_traces.json"
CASES = json.loads(TRACES.read_text())["cases"]
LRS = [3e-4, 2e-3]
BETAS = [(0.9, 0.95), (0.85, 0.999)]


def make_optimizer(kind: str = "adam", groups: int = 1) -> torch.optim.Optimizer:
    params: list[dict[str, Any]] = [
        {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": LRS[i]} for i in range(groups)
    ]
    if kind == "sgd":
        return torch.optim.SGD(params, lr=0.1)
    for group, betas in zip(params, BETAS, strict=False):
        group["betas"] = betas
    return torch.optim.Adam(params, lr=0.1)


def values(optimizer: torch.optim.Optimizer, name: str) -> list[list[float]]:
    return [[g["lr"], *(g.get("betas", ()) if name == "OneCycle" else ())] for g in optimizer.param_groups]


def trace(schedule: Any, optimizer: torch.optim.Optimizer, updates: int) -> list[float]:
    """The learning rate of the first group in force at each update."""
    found = []
    for _ in range(updates):
        found.append(optimizer.param_groups[0]["lr"])
        schedule.step()
    return found


def test_traces_cover_all_schedules() -> None:
    assert {case["name"] for case in CASES} == set(POLICIES)
    assert len(CASES) > 200
    assert all(len(case["trace"]) >= 60 for case in CASES)


@pytest.mark.parametrize("name", POLICIES)
def test_equals_deepspeed(name: str) -> None:
    compared = 0
    for case in CASES:
        if case["name"] != name:
            continue
        optimizer = make_optimizer(case["kind"], case["groups"])
        params = dict(case["params"])
        if "start" in case:
            params["last_batch_iteration"] = case["start"]
        schedule = build_scheduler(name, params, optimizer)
        for step, row in enumerate(case["trace"]):
            for got, expected in zip(values(optimizer, name), row, strict=True):
                assert got == pytest.approx(expected, rel=1e-12, abs=1e-15), (params, case["kind"], step)
                compared += 1
            if name != "OneCycle" and case["kind"] == "adam":
                assert [group["betas"] for group in optimizer.param_groups] == BETAS[: case["groups"]]
            if step == 3 and "load" in case:
                schedule.load_state_dict({"last_batch_iteration": case["load"]})
            if step == 3 and "jump" in case:
                schedule.step(case["jump"])
            else:
                schedule.step()
    assert compared > 1000


def test_state_is_one_counter_and_a_resumed_schedule_continues() -> None:
    optimizer = make_optimizer()
    whole = trace(WarmupDecayLR(optimizer, 40, warmup_num_steps=10), optimizer, 40)
    first = make_optimizer()
    before = WarmupDecayLR(first, 40, warmup_num_steps=10)
    start = trace(before, first, 25)
    state = before.state_dict()
    assert state == {"last_batch_iteration": 24}
    second = make_optimizer()
    after = WarmupDecayLR(second, 40, warmup_num_steps=10)
    after.load_state_dict(state)
    second.load_state_dict(first.state_dict())  # the value in force travels with the optimizer
    assert after.get_last_lr() == [whole[25]]
    assert start + trace(after, second, 15) == whole


@pytest.mark.parametrize("name", POLICIES)
def test_get_last_lr_is_the_value_in_force_also_before_the_first_step(name: str) -> None:
    required: dict[str, dict[str, Any]] = {
        "OneCycle": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3},
        "WarmupDecayLR": {"total_num_steps": 2000},
        "WarmupCosineLR": {"total_num_steps": 2000},
    }
    optimizer = make_optimizer(groups=2)
    schedule = build_scheduler(name, required.get(name, {}), optimizer)
    for _ in range(3):
        assert schedule.get_last_lr() == [group["lr"] for group in optimizer.param_groups]
        schedule.step()


def test_param_groups_are_read_anew_and_tensor_rates_stay_the_same_tensor() -> None:
    optimizer = make_optimizer()
    schedule = LRRangeTest(optimizer, 1e-4, 1, 1.0)
    rate = torch.tensor(0.5)
    optimizer.param_groups = [{**optimizer.param_groups[0], "lr": rate}]
    schedule.step()
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(2e-4)


def test_wrapped_optimizers_are_unwrapped() -> None:
    class Wrapper:
        def __init__(self) -> None:
            self.optimizer = make_optimizer()

    wrapper = Wrapper()
    WarmupLR(wrapper, warmup_min_lr=1e-6)
    assert wrapper.optimizer.param_groups[0]["lr"] == 1e-6
    with pytest.raises(TypeError, match="object"):
        WarmupLR(object())


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize(
    "make", [WarmupLR, lambda o, **k: WarmupDecayLR(o, 20, **k), lambda o, **k: WarmupCosineLR(o, 20, **k)]
)
def test_no_warmup_is_deepspeeds_shortest_with_a_warning(
    make: Callable[..., Any], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr("ds_hf.engine.optim.schedules.policies.warn_once", told.append)
    traces = []
    for steps in (number, 2):
        optimizer = make_optimizer()
        traces.append(trace(make(optimizer, warmup_num_steps=steps), optimizer, 20))
    assert traces[0] == traces[1]
    assert len(told) == 1
    assert "warmup_num_steps" in told[0]


# --- strict mode


@pytest.mark.parametrize("kind", ["log", "linear"])
@pytest.mark.parametrize("number", [0, 1, 2, 7, 10])
def test_strict_warmup_has_no_update_at_zero_and_reaches_the_peak_once(number: int, kind: str) -> None:
    options: dict[str, Any] = {"warmup_num_steps": number, "warmup_type": kind, "mode": "strict"}
    last = max(1, number) - 1
    for make, end in (
        (lambda o: WarmupLR(o, warmup_max_lr=1e-3, **options), 1e-3),
        (lambda o: WarmupDecayLR(o, 30, warmup_max_lr=1e-3, **options), 1e-3 / (30 - last)),
        (lambda o: WarmupCosineLR(o, 30, cos_min_ratio=0.01, **options), 0.01 * LRS[0]),
    ):
        optimizer = make_optimizer()
        rates = trace(make(optimizer), optimizer, 30)
        peak = max(rates)
        assert all(rate > 0 for rate in rates)
        assert rates.index(peak) == last
        assert peak == pytest.approx(LRS[0] if end == 0.01 * LRS[0] else 1e-3, rel=1e-12)
        assert rates[:last] == sorted(set(rates[:last]))
        assert rates[-1] == pytest.approx(end, rel=1e-9)


def test_strict_linear_values() -> None:
    optimizer = make_optimizer()
    rates = trace(WarmupDecayLR(optimizer, 8, 0.0, 1.0, 4, "linear", mode="strict"), optimizer, 10)
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.8, 0.6, 0.4, 0.2, 0.0, 0.0])
    optimizer = make_optimizer()
    schedule = WarmupCosineLR(optimizer, 8, 0.0, 4, 0.0, "linear", mode="strict")
    ratios = [rate / LRS[0] for rate in trace(schedule, optimizer, 8)]
    wave = [(1 + math.cos(math.pi * p / 4)) / 2 for p in (1, 2, 3, 4)]
    assert ratios == pytest.approx([0.25, 0.5, 0.75, 1.0, *wave], abs=1e-12)


def test_strict_one_cycle_keeps_beta2_and_bounds_beta1() -> None:
    kwargs: dict[str, Any] = {
        "cycle_min_lr": 1e-4,
        "cycle_max_lr": 1e-3,
        "cycle_first_step_size": 5,
        "decay_step_size": 1,
        "decay_mom_rate": 0.1,
    }
    loose, strict = make_optimizer(groups=2), make_optimizer(groups=2)
    schedules = [OneCycle(loose, **kwargs), OneCycle(strict, **kwargs, mode="strict")]
    assert strict.param_groups[0]["betas"] == (0.9, 0.95)
    assert loose.param_groups[0]["betas"] == (0.8, 0.99)
    betas = []
    for _ in range(40):
        for schedule in schedules:
            schedule.step()
        betas.append([group["betas"] for group in strict.param_groups])
        assert [group["lr"] for group in strict.param_groups] == [group["lr"] for group in loose.param_groups]
    assert loose.param_groups[0]["betas"][0] > 1.0
    assert max(row[0][0] for row in betas) == 0.99
    assert min(row[0][0] for row in betas) == pytest.approx(0.8)
    assert all([pair[1] for pair in row] == [0.95, 0.999] for row in betas)


# --- names and errors


@pytest.mark.parametrize(
    ("name", "params", "words"),
    [
        ("LRRangeTest", {"lr_range_test_step_size": -5}, ["lr_range_test_step_size", "-5"]),
        ("LRRangeTest", {"lr_range_test_step_size": 2.5}, ["lr_range_test_step_size", "whole number"]),
        ("LRRangeTest", {"lr_range_test_min_lr": [1e-3, 1e-4]}, ["lr_range_test_min_lr", "2 values", "1 param group"]),
        ("OneCycle", {"cycle_min_lr": 1e-4}, ["cycle_max_lr", "missing"]),
        ("OneCycle", {}, ["cycle_min_lr", "cycle_max_lr"]),
        ("OneCycle", {"cycle_min_lr": 1e-4, "cycle_max_lr": 1, "cycle_first_step_size": 0}, ["cycle_first_step_size"]),
        (
            "OneCycle",
            {"cycle_min_lr": 1e-4, "cycle_max_lr": 1, "cycle_second_step_size": -1},
            ["cycle_second_step_size"],
        ),
        ("OneCycle", {"cycle_min_lr": 1e-4, "cycle_max_lr": 1, "decay_step_size": -1}, ["decay_step_size"]),
        ("OneCycle", {"cycle_min_lr": 1, "cycle_max_lr": 1, "post_cycle_decay_step_size": 5}, ["decay_step_size?"]),
        ("WarmupLR", {"warmup_num_steps": -1}, ["warmup_num_steps", "-1"]),
        ("WarmupLR", {"warmup_num_steps": "auto"}, ["warmup_num_steps", "auto"]),
        ("WarmupLR", {"warmup_num_steps": True}, ["warmup_num_steps", "True"]),
        ("WarmupLR", {"warmup_num_steps": math.inf}, ["warmup_num_steps", "inf"]),
        ("WarmupLR", {"warmup_max_lr": [1.0, 2.0, 3.0]}, ["warmup_max_lr", "3 values"]),
        ("WarmupLR", {"warmup_steps": 5}, ["warmup_steps", "did you mean warmup_"]),
        ("WarmupDecayLR", {}, ["total_num_steps", "missing"]),
        ("WarmupDecayLR", {"total_num_steps": 0}, ["total_num_steps", "at least 1"]),
        ("WarmupCosineLR", {"total_num_steps": 10, "warmup_min_lr": 0}, ["warmup_min_lr", "warmup_min_ratio"]),
        ("warmuplr", {}, ["WarmupLR"]),
        ("ReduceLROnPlateau", {}, ["metric"]),
    ],
)
def test_wrong_sections_name_the_key(name: str, params: dict[str, Any], words: list[str]) -> None:
    optimizer = make_optimizer()
    with pytest.raises(ConfigError) as caught:
        build_scheduler(name, params, optimizer)
    for word in words:
        assert word in str(caught.value)
    assert all(fault.pointer.startswith("/scheduler") for fault in caught.value.faults)
    assert isinstance(caught.value, ValueError)


def test_all_faults_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        build_scheduler("WarmupDecayLR", {"warmup": 3, "warmup_min_lr": "auto"}, make_optimizer())
    assert len(caught.value.faults) == 3


def test_a_warmup_longer_than_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr("ds_hf.engine.optim.schedules.policies.warn_once", told.append)
    for make in (WarmupDecayLR, WarmupCosineLR):
        with pytest.raises(ValueError, match=r"warmup_num_steps 10 is more than total_num_steps 5"):
            make(make_optimizer(), 5, warmup_num_steps=10, mode="strict")
    WarmupDecayLR(make_optimizer(), 7, warmup_num_steps=11)
    assert len(told) == 1
    assert "warmup_num_steps 11 is more than total_num_steps 7" in told[0]


@pytest.mark.parametrize(("rate", "steps"), [(1 / 9, 5), (0.05, 7), (0.0, None)])
def test_a_beta1_that_grows_to_one_is_told(monkeypatch: pytest.MonkeyPatch, rate: float, steps: int | None) -> None:
    told: list[str] = []
    monkeypatch.setattr("ds_hf.engine.optim.schedules.policies.warn_once", told.append)
    optimizer = make_optimizer()
    given: Any = {"cycle_first_step_size": 2, "decay_step_size": 1, "decay_mom_rate": rate}
    OneCycle(make_optimizer(), 1e-4, 1e-3, **given, mode="strict")
    schedule, betas = OneCycle(optimizer, 1e-4, 1e-3, **given), []
    for _ in range(9):
        betas.append(optimizer.param_groups[0]["betas"][0])
        schedule.step()
    assert next((step for step, beta in enumerate(betas) if beta >= 1), None) == steps
    assert ["compat_schedules" in line and f"after {steps} steps" in line for line in told] == [True] * (rate > 0)


def test_unknown_warmup_type_falls_back_loudly_or_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr("ds_hf.engine.optim.schedules.policies.warn_once", told.append)
    with pytest.raises(ValueError, match="warmup_type"):
        WarmupLR(make_optimizer(), warmup_type="cosine", mode="strict")
    assert WarmupLR(make_optimizer(), warmup_type="sine").warmup_type == "log"
    assert len(told) == 1
    assert "'sine'" in told[0]


def test_mode_is_checked() -> None:
    with pytest.raises(ValueError, match="mode"):
        WarmupLR(make_optimizer(), mode="exact")  # type: ignore[arg-type]


def test_torch_schedules_by_name() -> None:
    optimizer = make_optimizer()
    schedule = build_scheduler("StepLR", {"step_size": 2, "gamma": 0.5}, optimizer)
    optimizer.step()
    schedule.step()
    schedule.step()
    assert schedule.get_last_lr() == [LRS[0] * 0.5]
    with pytest.raises(ConfigError, match=r"step_sizes.*\n.*did you mean step_size"):
        build_scheduler("StepLR", {"step_sizes": 2, "step_size": 2}, optimizer)


def test_one_cycle_without_betas_keeps_cycling_the_rate() -> None:
    optimizer = make_optimizer("sgd")
    schedule = OneCycle(optimizer, 0.1, 1.0, cycle_first_step_size=2)
    assert schedule.get_mom() is None
    assert trace(schedule, optimizer, 5) == pytest.approx([0.1, 0.55, 1.0, 0.55, 0.1])
    assert "betas" not in optimizer.param_groups[0]


def test_step_ratio_is_the_share_of_the_rising_half() -> None:
    schedule = OneCycle(make_optimizer(), 0.1, 0.2, cycle_first_step_size=3, cycle_second_step_size=1)
    assert schedule.step_ratio == 0.75


def test_one_rate_in_place_of_several_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr("ds_hf.engine.optim.schedules.policies.warn_once", lambda text, **_: told.append(text))
    replacing: list[tuple[str, dict[str, Any]]] = [
        ("WarmupLR", {"warmup_max_lr": 1e-3}),
        ("WarmupDecayLR", {"total_num_steps": 2000}),
        ("OneCycle", {"cycle_min_lr": 0.0, "cycle_max_lr": 1e-3}),
        ("LRRangeTest", {}),
        ("OneCycleLR", {"max_lr": 1e-3, "total_steps": 100}),
    ]
    for name, params in replacing:
        build_scheduler(name, params, make_optimizer(groups=2))
        assert len(told) == 1, name
        assert "0.0003, 0.002" in told.pop()
        build_scheduler(name, params, make_optimizer())
    keeping: list[tuple[str, dict[str, Any]]] = [
        ("WarmupLR", {}),
        ("WarmupDecayLR", {"total_num_steps": 2000, "warmup_max_lr": LRS}),
        ("WarmupCosineLR", {"total_num_steps": 2000}),
        ("StepLR", {"step_size": 2}),
    ]
    for name, params in keeping:
        build_scheduler(name, params, make_optimizer(groups=2))
    assert not told
