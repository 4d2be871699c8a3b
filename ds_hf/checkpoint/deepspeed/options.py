"""Options of parameter groups and the loss scaler, as DeepSpeed keeps them beside flat tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_hf.checkpoint.deepspeed.pickles import DynamicScaler, StaticScaler
from ds_hf.errors import CheckpointError

__all__ = ["as_step", "base_groups", "names_of_groups", "of", "options_of", "scaler_of"]


def of(kind: type[Any], value: Any, path: Path, what: str) -> Any:
    """``value`` if it is of the type ``kind``, else a ``CheckpointError`` that names it."""
    if not isinstance(value, kind):
        raise CheckpointError(f"{path}: {what} should be a {kind.__name__}, not a {type(value).__name__}")
    return value


def base_groups(base: Any) -> list[dict[str, Any]] | None:
    """The list ``param_groups`` of a torch optimizer's state, ``None`` where there is none."""
    groups = base.get("param_groups") if isinstance(base, dict) else None
    return groups if isinstance(groups, list) and all(isinstance(group, dict) for group in groups) else None


def options_of(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each group all but its parameters."""
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


def names_of_groups(groups: Sequence[dict[str, Any]], shapes: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Names of the parameters of each group: at stage 3 it may lie in several flat tensors."""
    found = []
    for group in groups:
        params = group.get("params", ())
        indices = [i for i in params if isinstance(i, int) and 0 <= i < len(shapes)] if isinstance(params, list) else []
        found.append([str(name) for index in indices for name in shapes[index]])
    return found


def scaler_of(scaler: Any) -> dict[str, Any] | None:
    """The loss scaler as our checkpoints have it."""
    if isinstance(scaler, DynamicScaler):
        return {"kind": "DynamicLossScaler", "state": _scaler_state(scaler)}
    if isinstance(scaler, StaticScaler):
        return {"kind": "StaticLossScaler", "state": {"scale": float(scaler.get("cur_scale", 1))}}
    return None


def as_step(key: str, value: Any) -> Any:
    """torch keeps the step as an fp32 tensor, DeepSpeed's own optimizers as a number."""
    return torch.tensor(float(value)) if key == "step" and not isinstance(value, Tensor) else value


def _scaler_state(scaler: DynamicScaler) -> dict[str, Any]:
    return {
        "scale": float(scaler.get("cur_scale", 1.0)),
        "boundary": int(scaler.get("cur_iter", 0)),
        "last_overflow": int(scaler.get("last_overflow_iter", -1)),
        "hysteresis_left": int(scaler.get("cur_hysteresis", 1)),
        "consecutive_overflows": 0,
        "settings": {
            "loss_scale_window": int(scaler.get("scale_window", 1000)),
            "hysteresis": int(scaler.get("delayed_shift", 2)),
            "consecutive_hysteresis": bool(scaler.get("consecutive_hysteresis", False)),
            "min_loss_scale": float(scaler.get("min_scale", 1.0)),
        },
    }
