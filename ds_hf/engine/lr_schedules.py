"""Learning-rate schedules by name: from the JSON's ``scheduler`` section and from DeepSpeed's tuning arguments.

The schedules themselves are in ``lr_policies``; this module is what the rest of ds_hf imports, and what
``deepspeed.runtime.lr_schedules`` re-exports. A name that is none of the five is looked up in
``torch.optim.lr_scheduler``, as DeepSpeed does.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ds_hf.engine.lr_policies import (
    LRRangeTest,
    OneCycle,
    Schedule,
    ScheduleMode,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    torch_optimizer,
)
from ds_hf.engine.optim.json_params import accepted_params, nearest, param_faults
from ds_hf.errors import ConfigError, Fault

__all__ = [
    "VALID_LR_SCHEDULES",
    "LRRangeTest",
    "OneCycle",
    "Schedule",
    "ScheduleMode",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "add_tuning_arguments",
    "build_scheduler",
    "get_config_from_args",
    "get_lr_from_config",
    "override_1cycle_params",
    "override_lr_range_test_params",
    "override_params",
    "override_warmupCosineLR_params",
    "override_warmupLR_params",
]

_POLICIES: Mapping[str, type[Schedule]] = {
    "LRRangeTest": LRRangeTest,
    "OneCycle": OneCycle,
    "WarmupLR": WarmupLR,
    "WarmupDecayLR": WarmupDecayLR,
    "WarmupCosineLR": WarmupCosineLR,
}
VALID_LR_SCHEDULES = list(_POLICIES)
_HIDDEN = ("optimizer", "mode")  # constructor parameters that are not the JSON's

# torch schedules that a JSON file cannot describe, and why.
_NOT_FROM_JSON = {
    "ReduceLROnPlateau": "it must be stepped with a metric",
    "LambdaLR": "it needs a function",
    "MultiplicativeLR": "it needs a function",
    "SequentialLR": "it needs schedule objects",
    "ChainedScheduler": "it needs schedule objects",
    "LRScheduler": "it is the base class",
}


def build_scheduler(
    name: str, params: Mapping[str, Any] | None, optimizer: Any, mode: ScheduleMode = "deepspeed"
) -> Schedule | torch.optim.lr_scheduler.LRScheduler:
    """The schedule that ``scheduler: {type: name, params: params}`` asks for, set up on ``optimizer``.

    Raises:
        ConfigError: unknown name, unknown, missing or wrong parameters; every one of them is named.
    """
    params = dict(params or {})
    own = name in _POLICIES
    cls: Callable[..., Any] = _POLICIES[name] if own else _torch_policy(name)
    faults = param_faults("scheduler", name, params, accepted_params(cls, _HIDDEN))
    if faults:
        raise ConfigError(faults)
    try:
        built = cls(optimizer, **params, mode=mode) if own else cls(torch_optimizer(optimizer), **params)
    except ValueError as error:
        raise ConfigError([Fault("/scheduler/params", f"{name}: {error}")]) from error
    return built  # type: ignore[no-any-return]


def get_lr_from_config(config: Mapping[str, Any]) -> tuple[float | None, str]:
    """The main learning rate of a ``scheduler`` section and "", or None and the reason why there is none."""
    for key in ("type", "params"):
        if key not in config:
            return None, f'the scheduler section has no "{key}"'
    name, params = config["type"], config["params"]
    if name not in _POLICIES:
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
    if name not in _POLICIES:
        return None, f"--lr_schedule {name!r} is not one of {', '.join(VALID_LR_SCHEDULES)}"
    return {"type": name, "params": _given(args, name)}, None


def override_lr_range_test_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Write what the command line says about LRRangeTest into ``params``."""
    params.update(_given(args, "LRRangeTest"))


def override_1cycle_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Write what the command line says about OneCycle into ``params``."""
    params.update(_given(args, "OneCycle"))


def override_warmupLR_params(args: argparse.Namespace, params: dict[str, Any]) -> None:  # noqa: N802
    """Write what the command line says about WarmupLR into ``params``."""
    params.update(_given(args, "WarmupLR"))


def override_warmupCosineLR_params(args: argparse.Namespace, params: dict[str, Any]) -> None:  # noqa: N802
    """Write what the command line says about WarmupCosineLR into ``params``."""
    params.update(_given(args, "WarmupCosineLR"))


def override_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Write what the command line says about any of the schedules into ``params``."""
    for name in _POLICIES:
        params.update(_given(args, name))


def _given(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """The parameters of schedule ``name`` among parsed arguments."""
    accepted = accepted_params(_POLICIES[name], _HIDDEN)
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


def _torch_policy(name: str) -> Callable[..., Any]:
    if name in _NOT_FROM_JSON:
        fix = "build it in Python and pass it to initialize(lr_scheduler=...)"
        raise ConfigError([Fault("/scheduler/type", f"{name} cannot come from JSON: {_NOT_FROM_JSON[name]}", fix)])
    cls = getattr(torch.optim.lr_scheduler, name, None)
    if isinstance(cls, type) and issubclass(cls, torch.optim.lr_scheduler.LRScheduler):
        return cls
    lower = {known.lower(): known for known in VALID_LR_SCHEDULES}
    near = lower.get(nearest(name.lower(), lower) or "")
    fix = f"did you mean {near}? " if near else ""
    fix += f"use one of {', '.join(VALID_LR_SCHEDULES)}, or a class of torch.optim.lr_scheduler"
    raise ConfigError([Fault("/scheduler/type", f"there is no scheduler {name!r}", fix)])
