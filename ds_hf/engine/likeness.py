"""What processes that train one model have to have in common, as names and values that ``Building.compare`` holds
against each other: the configuration, the optimizer and schedule, and the model.

Left out is what may differ: where a process writes and reads, and what it only prints or records.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ds_hf.config.types import Config
from ds_hf.engine.zero.buffer import logical_shape

__all__ = ["describe_model", "describe_settings"]

# Keys of the file that may have a value of their own on each process, and fields that are no keys.
_OWN = {"source", "resolved", "provenance", "warnings", "mesh", "report", "log_level", "steps_per_print", "dump_state"}
_OWN |= {"job_name", "comms_logger", "flops_profiler", "autotuning", "nebula"}
_OWN |= {"local_rank", "device_id", "wall_clock_breakdown", "memory_breakdown", "hang_timeout", "timers"}
_PLACES = re.compile(r"(^|_)(path|dir|folder|file|seed)s?$")
_PLAIN = (bool, int, float, str, type(None))


def describe_settings(settings: Config, optimizer: Any, model_parameters: Any, lr_scheduler: Any) -> dict[str, str]:
    """Of the configuration with its defaults, and of the objects given beside it."""
    found = {f"/{name}": value for name, value in _leaves(settings)}
    if settings.mesh is not None:
        found |= {f"mesh.{name}": value for name, value in _leaves(settings.mesh)}
    found["/ds_hf/report"] = "None" if settings.ds_hf.report is None else "a folder"  # all record, or none
    found |= dict(_of_optimizer(optimizer))
    if isinstance(model_parameters, list | tuple) and model_parameters and isinstance(model_parameters[0], dict):
        found |= dict(_of_groups(model_parameters, "model_parameters"))
    if lr_scheduler is not None:
        found["lr_scheduler"] = _name(lr_scheduler)
        own = vars(lr_scheduler) if hasattr(lr_scheduler, "__dict__") and not callable(lr_scheduler) else {}
        found |= {f"lr_scheduler.{name}": value for name, value in _plain(own)}
    return found


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    if dataclasses.is_dataclass(value):
        items = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    elif isinstance(value, Mapping):
        items = sorted((str(key), each) for key, each in value.items())
    else:
        yield prefix, repr(value)
        return
    if prefix:
        yield prefix, "given"
    for name, each in items:
        if name not in _OWN and not _PLACES.search(name):
            yield from _leaves(each, f"{prefix}/{name.rstrip('_')}" if prefix else name.rstrip("_"))


def _of_optimizer(optimizer: Any) -> Iterator[tuple[str, str]]:
    if optimizer is None:
        return
    yield "optimizer", _name(optimizer)
    if isinstance(optimizer, Optimizer):
        yield from ((f"optimizer.defaults.{name}", value) for name, value in _plain(optimizer.defaults))
        yield from _of_groups(optimizer.param_groups, "optimizer")


def _of_groups(groups: Any, prefix: str) -> Iterator[tuple[str, str]]:
    yield f"{prefix}.groups", str(len(groups))
    for number, group in enumerate(groups):
        yield from ((f"{prefix}.groups[{number}].{name}", value) for name, value in _plain(group))


def _plain(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Numbers, texts and lists of them; parameters and what else an object keeps are no settings."""
    for name, value in values.items():
        if isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta:
            yield name, repr(value.item())
        elif isinstance(value, _PLAIN) or (
            isinstance(value, list | tuple) and all(isinstance(each, _PLAIN) for each in value)
        ):
            yield name, repr(value)


def _name(value: Any) -> str:
    kind = value if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")) else type(value)
    return str(kind.__qualname__)


@torch.no_grad()
def describe_model(model: nn.Module) -> dict[str, str]:
    """Of its modules and parameters."""
    found = {f"model {name}".rstrip(): type(module).__qualname__ for name, module in model.named_modules()}
    for name, param in model.named_parameters(remove_duplicate=False):
        trained = "" if param.requires_grad else ", frozen"
        dtype = str(param.dtype).removeprefix("torch.")
        found[f"parameter {name}"] = f"{list(logical_shape(param))} {dtype}{trained}"
    return found
