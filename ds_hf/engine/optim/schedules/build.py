"""Learning-rate schedules by name, from the JSON's ``scheduler`` section.

A name that is none of the five of ``policies`` is looked up in ``torch.optim.lr_scheduler``, as DeepSpeed does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ds_hf.engine.optim.build import accepted_params, nearest, param_faults
from ds_hf.engine.optim.schedules.policies import (
    LRRangeTest,
    OneCycle,
    Schedule,
    ScheduleMode,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    tell_replaced,
    torch_optimizer,
)
from ds_hf.errors import ConfigError, Fault

__all__ = ["POLICIES", "build_scheduler", "param_names"]

POLICIES: Mapping[str, type[Schedule]] = {
    "LRRangeTest": LRRangeTest,
    "OneCycle": OneCycle,
    "WarmupLR": WarmupLR,
    "WarmupDecayLR": WarmupDecayLR,
    "WarmupCosineLR": WarmupCosineLR,
}
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
    own = name in POLICIES
    cls: Callable[..., Any] = POLICIES[name] if own else _torch_policy(name)
    faults = param_faults("scheduler", name, params, param_names(cls))
    if faults:
        raise ConfigError(faults)
    rates = [float(group["lr"]) for group in torch_optimizer(optimizer).param_groups]
    try:
        built = cls(optimizer, **params, mode=mode) if own else cls(torch_optimizer(optimizer), **params)
    except ValueError as error:
        raise ConfigError([Fault("/scheduler/params", f"{name}: {error}")]) from error
    left = {float(group["lr"]) for group in torch_optimizer(optimizer).param_groups}
    if not own and len(left) == 1 and left != {0.0}:
        tell_replaced(rates, f"{name}'s {next(iter(left)):g}")
    return built  # type: ignore[no-any-return]


def param_names(cls: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """What the JSON may give to a schedule of this class."""
    return accepted_params(cls, _HIDDEN)


def _torch_policy(name: str) -> Callable[..., Any]:
    if name in _NOT_FROM_JSON:
        fix = "build it in Python and pass it to initialize(lr_scheduler=...)"
        raise ConfigError([Fault("/scheduler/type", f"{name} cannot come from JSON: {_NOT_FROM_JSON[name]}", fix)])
    cls = getattr(torch.optim.lr_scheduler, name, None)
    if isinstance(cls, type) and issubclass(cls, torch.optim.lr_scheduler.LRScheduler):
        return cls
    lower = {known.lower(): known for known in POLICIES}
    near = lower.get(nearest(name.lower(), lower) or "")
    fix = f"did you mean {near}? " if near else ""
    fix += f"use one of {', '.join(POLICIES)}, or a class of torch.optim.lr_scheduler"
    raise ConfigError([Fault("/scheduler/type", f"there is no scheduler {name!r}", fix)])
