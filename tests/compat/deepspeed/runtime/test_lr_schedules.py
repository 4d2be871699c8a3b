"""The ``scheduler`` section from command-line arguments, and what scripts ask of one."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from deepspeed.runtime.lr_schedules import (
    VALID_LR_SCHEDULES,
    add_tuning_arguments,
    get_config_from_args,
    get_lr_from_config,
    override_1cycle_params,
    override_lr_range_test_params,
    override_params,
    override_warmupCosineLR_params,
    override_warmupLR_params,
)

from ds_hf.engine.optim.schedules.build import build_scheduler


def make_optimizer() -> torch.optim.Optimizer:
    return torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)


def test_tuning_arguments_build_every_schedule() -> None:
    parser = add_tuning_arguments(argparse.ArgumentParser())
    assert get_config_from_args(parser.parse_args([]))[0] is None
    reason = get_config_from_args(parser.parse_args(["--lr_schedule", "Cosine"]))[1]
    assert reason is not None
    assert "Cosine" in reason
    for name in VALID_LR_SCHEDULES:
        config, problem = get_config_from_args(parser.parse_args(["--lr_schedule", name, "--warmup_num_steps", "5"]))
        assert problem is None
        assert config is not None
        assert config["type"] == name
        if name in ("WarmupDecayLR", "WarmupCosineLR"):  # DeepSpeed has no argument for the length of the run
            config["params"]["total_num_steps"] = 100
        build_scheduler(name, config["params"], make_optimizer()).step()
    config, _ = get_config_from_args(parser.parse_args(["--lr_schedule", "OneCycle", "--cycle_second_step_size", "7"]))
    assert config is not None
    assert config["params"]["cycle_second_step_size"] == 7
    assert config["params"]["cycle_first_step_size"] == 1000
    assert config["params"]["cycle_momentum"] is False


def test_arguments_override_parameters() -> None:
    parser = add_tuning_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--lr_range_test_staircase", "--cycle_max_lr", "0.3", "--warmup_type", "linear"])
    params: dict[str, Any] = {"cycle_max_lr": 0.1, "other": 1}
    override_1cycle_params(args, params)
    assert (params["cycle_max_lr"], params["other"], params["cycle_momentum"]) == (0.3, 1, False)
    assert "cycle_second_step_size" not in params
    params = {}
    override_lr_range_test_params(args, params)
    assert set(params) == {f"lr_range_test_{key}" for key in ("min_lr", "step_rate", "step_size", "staircase")}
    assert params["lr_range_test_staircase"] is True
    params = {}
    override_warmupLR_params(args, params)
    assert params["warmup_type"] == "linear"
    assert "warmup_min_ratio" not in params
    override_warmupCosineLR_params(args, params)
    assert params["warmup_min_ratio"] == 0.01
    params = {}
    override_params(args, params)
    assert {"cycle_max_lr", "lr_range_test_min_lr", "warmup_max_lr", "cos_min_ratio"} <= set(params)


def test_get_lr_from_config() -> None:
    assert get_lr_from_config({"type": "OneCycle", "params": {"cycle_max_lr": 0.1}}) == (0.1, "")
    assert get_lr_from_config({"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 0.2}}) == (0.2, "")
    assert get_lr_from_config({"type": "WarmupDecayLR", "params": {"warmup_max_lr": 0.3}}) == (0.3, "")
    for config in (
        {"params": {}},
        {"type": "WarmupLR"},
        {"type": "StepLR", "params": {}},
        {"type": "WarmupLR", "params": {}},
        {"type": "WarmupCosineLR", "params": {}},
    ):
        lr, reason = get_lr_from_config(config)
        assert lr is None
        assert reason
