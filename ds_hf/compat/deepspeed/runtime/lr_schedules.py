"""``deepspeed.runtime.lr_schedules``: constants, the ``scheduler`` section as arguments, and questions about it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from ds_hf.engine.optim.schedules.build import POLICIES, param_names
from ds_hf.engine.optim.schedules.policies import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = [
    "COS_MIN_RATIO",
    "CYCLE_FIRST_STAIR_COUNT",
    "CYCLE_FIRST_STEP_SIZE",
    "CYCLE_MAX_LR",
    "CYCLE_MAX_MOM",
    "CYCLE_MIN_LR",
    "CYCLE_MIN_MOM",
    "CYCLE_MOMENTUM",
    "CYCLE_SECOND_STAIR_COUNT",
    "CYCLE_SECOND_STEP_SIZE",
    "DECAY_LR_RATE",
    "DECAY_MOM_RATE",
    "DECAY_STEP_SIZE",
    "LR_RANGE_TEST",
    "LR_RANGE_TEST_MIN_LR",
    "LR_RANGE_TEST_STAIRCASE",
    "LR_RANGE_TEST_STEP_RATE",
    "LR_RANGE_TEST_STEP_SIZE",
    "LR_SCHEDULE",
    "ONE_CYCLE",
    "TOTAL_NUM_STEPS",
    "VALID_LR_SCHEDULES",
    "WARMUP_COSINE_LR",
    "WARMUP_DECAY_LR",
    "WARMUP_LINEAR_RATE",
    "WARMUP_LOG_RATE",
    "WARMUP_LR",
    "WARMUP_MAX_LR",
    "WARMUP_MIN_LR",
    "WARMUP_MIN_RATIO",
    "WARMUP_NUM_STEPS",
    "WARMUP_TYPE",
    "LRRangeTest",
    "OneCycle",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "add_tuning_arguments",
    "get_config_from_args",
    "get_lr_from_config",
    "override_1cycle_params",
    "override_lr_range_test_params",
    "override_params",
    "override_warmupCosineLR_params",
    "override_warmupLR_params",
]

# The keys and values of a section, which scripts import instead of writing them.
LR_SCHEDULE = "lr_schedule"

LR_RANGE_TEST = "LRRangeTest"
LR_RANGE_TEST_MIN_LR = "lr_range_test_min_lr"
LR_RANGE_TEST_STAIRCASE = "lr_range_test_staircase"
LR_RANGE_TEST_STEP_RATE = "lr_range_test_step_rate"
LR_RANGE_TEST_STEP_SIZE = "lr_range_test_step_size"

ONE_CYCLE = "OneCycle"
CYCLE_FIRST_STAIR_COUNT = "cycle_first_stair_count"
CYCLE_FIRST_STEP_SIZE = "cycle_first_step_size"
CYCLE_MAX_LR = "cycle_max_lr"
CYCLE_MAX_MOM = "cycle_max_mom"
CYCLE_MIN_LR = "cycle_min_lr"
CYCLE_MIN_MOM = "cycle_min_mom"
CYCLE_MOMENTUM = "cycle_momentum"
CYCLE_SECOND_STAIR_COUNT = "cycle_second_stair_count"
CYCLE_SECOND_STEP_SIZE = "cycle_second_step_size"
DECAY_LR_RATE = "decay_lr_rate"
DECAY_MOM_RATE = "decay_mom_rate"
DECAY_STEP_SIZE = "decay_step_size"

WARMUP_LR = "WarmupLR"
WARMUP_DECAY_LR = "WarmupDecayLR"
WARMUP_COSINE_LR = "WarmupCosineLR"
COS_MIN_RATIO = "cos_min_ratio"
TOTAL_NUM_STEPS = "total_num_steps"
WARMUP_MAX_LR = "warmup_max_lr"
WARMUP_MIN_LR = "warmup_min_lr"
WARMUP_MIN_RATIO = "warmup_min_ratio"
WARMUP_NUM_STEPS = "warmup_num_steps"
WARMUP_TYPE = "warmup_type"
WARMUP_LINEAR_RATE = "linear"
WARMUP_LOG_RATE = "log"

VALID_LR_SCHEDULES = list(POLICIES)


def get_lr_from_config(config: Mapping[str, Any]) -> tuple[float | None, str]:
    """The main learning rate of a ``scheduler`` section and "", or None and the reason why there is none."""
    for key in ("type", "params"):
        if key not in config:
            return None, f'the scheduler section has no "{key}"'
    name, params = config["type"], config["params"]
    if name not in POLICIES:
        return None, f"{name!r} is not one of {', '.join(VALID_LR_SCHEDULES)}"
    if name == "WarmupCosineLR":
        return None, "WarmupCosineLR scales the optimizer's own learning rate, so its params hold none"
    key = {"LRRangeTest": "lr_range_test_min_lr", "OneCycle": "cycle_max_lr"}.get(name, "warmup_max_lr")
    if key not in params:
        return None, f"{name}: {key} is not in params"
    return params[key], ""


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add DeepSpeed's command-line options for schedules, with its names and defaults."""
    group = parser.add_argument_group("Learning-rate schedule", "the scheduler section of the JSON, as arguments")
    group.add_argument("--lr_schedule", type=str, default=None, help="one of " + ", ".join(VALID_LR_SCHEDULES))
    for key in ("lr_range_test_staircase", "cycle_momentum"):
        group.add_argument(f"--{key}", action="store_true", default=False, help=_HELP[key])
    for key, default in _ARGUMENT_DEFAULTS.items():
        kind = float if key == "warmup_min_lr" else type(default)
        group.add_argument(f"--{key}", type=kind, default=default, help=_HELP[key])
    return parser


def get_config_from_args(args: argparse.Namespace) -> tuple[dict[str, Any] | None, str | None]:
    """A ``scheduler`` section from parsed ``add_tuning_arguments``, or None and the reason."""
    name = getattr(args, "lr_schedule", None)
    if name is None:
        return None, "--lr_schedule was not given"
    if name not in POLICIES:
        return None, f"--lr_schedule {name!r} is not one of {', '.join(VALID_LR_SCHEDULES)}"
    return {"type": name, "params": _given(args, name)}, None


def override_lr_range_test_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Write what the command line says about LRRangeTest into ``params``."""
    params.update(_given(args, "LRRangeTest"))


def override_1cycle_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Write what the command line says about OneCycle into ``params``."""
    params.update(_given(args, "OneCycle"))


def override_warmupLR_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Write what the command line says about WarmupLR into ``params``."""
    params.update(_given(args, "WarmupLR"))


def override_warmupCosineLR_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Write what the command line says about WarmupCosineLR into ``params``."""
    params.update(_given(args, "WarmupCosineLR"))


def override_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Write what the command line says about any of the schedules into ``params``."""
    for name in POLICIES:
        params.update(_given(args, name))


def _given(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """The parameters of schedule ``name`` among parsed arguments."""
    accepted = param_names(POLICIES[name])
    values = {key: value for key, value in vars(args).items() if key in accepted and value is not None}
    # -1 is the command line's "not given" for these three, and no legal value.
    absent = ("cycle_second_step_size", "cycle_second_stair_count", "cycle_first_stair_count")
    return {key: value for key, value in values.items() if not (key in absent and value == -1)}


_ARGUMENT_DEFAULTS: Mapping[str, Any] = {
    "lr_range_test_min_lr": 0.001,
    "lr_range_test_step_rate": 1.0,
    "lr_range_test_step_size": 1000,
    "cycle_first_step_size": 1000,
    "cycle_first_stair_count": -1,
    "cycle_second_step_size": -1,
    "cycle_second_stair_count": -1,
    "decay_step_size": 1000,
    "cycle_min_lr": 0.01,
    "cycle_max_lr": 0.1,
    "decay_lr_rate": 0.0,
    "cycle_min_mom": 0.8,
    "cycle_max_mom": 0.9,
    "decay_mom_rate": 0.0,
    "warmup_min_lr": 0,
    "warmup_max_lr": 0.001,
    "warmup_num_steps": 1000,
    "warmup_type": "log",
    "warmup_min_ratio": 0.01,
    "cos_min_ratio": 0.01,
}

_HELP: Mapping[str, str] = {
    "lr_range_test_min_lr": "learning rate at which the range test starts",
    "lr_range_test_step_rate": "growth in one interval, as a multiple of the first learning rate",
    "lr_range_test_step_size": "updates in one interval",
    "lr_range_test_staircase": "grow once an interval instead of at every update",
    "cycle_first_step_size": "updates of the rising half",
    "cycle_first_stair_count": "stairs of the rising half; -1 for none",
    "cycle_second_step_size": "updates of the falling half; -1 for as many as the rising half",
    "cycle_second_stair_count": "stairs of the falling half; -1 for as many as the rising half",
    "decay_step_size": "updates in one interval of the decay after the cycle; 0 for no decay",
    "cycle_min_lr": "learning rate at both ends of the cycle",
    "cycle_max_lr": "learning rate at the peak of the cycle",
    "decay_lr_rate": "decay of the learning rate in one interval after the cycle",
    "cycle_momentum": "move beta1 against the learning rate",
    "cycle_min_mom": "beta1 at the peak of the cycle",
    "cycle_max_mom": "beta1 at both ends of the cycle",
    "decay_mom_rate": "growth of beta1 in one interval after the cycle",
    "warmup_min_lr": "learning rate at which the warm-up starts",
    "warmup_max_lr": "learning rate at which the warm-up ends",
    "warmup_num_steps": "updates of the warm-up",
    "warmup_type": "log or linear",
    "warmup_min_ratio": "share of the learning rate at which the warm-up starts (WarmupCosineLR)",
    "cos_min_ratio": "share of the learning rate at which the cosine ends (WarmupCosineLR)",
}
