"""What processes that train one model have to have in common, as names and values that ``Building.compare`` holds
against each other: the configuration, the optimizer and schedule, and the model.

Left out is what may differ: where a process writes and reads, and what it only prints or records.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ds_hf.config.types import Config
from ds_hf.engine.zero.buffer import logical_shape

__all__ = [
    "describe_arguments",
    "describe_config",
    "describe_model",
    "describe_scheduler",
    "describe_settings",
    "describe_users_modules",
    "plain_texts",
]

# Keys of the file that may have a value of their own on each process, and fields that are no keys.
_OWN = {"source", "resolved", "provenance", "warnings", "mesh", "report", "log_level", "steps_per_print", "dump_state"}
_OWN |= {"job_name", "comms_logger", "flops_profiler", "autotuning", "nebula"}
_OWN |= {"local_rank", "device_id", "wall_clock_breakdown", "memory_breakdown", "hang_timeout", "timers"}
_PLACES = re.compile(r"(^|_)(path|dir|folder|file|seed)s?$")
_PLAIN = (bool, int, float, str, type(None))
# Attributes of modules that say nothing about what they compute, or may say it of one process.
_OF_A_PROCESS = re.compile(
    r"(^|_)(rank|device|index|idx|id|start|end|offset|process|group|host|cached?|name|version)s?($|_)|^training$"
    "|gradient_checkpointing"
)
# What ``save_pretrained`` writes into a configuration, on the process that saves; dtypes are those of parameters.
_WRITTEN = re.compile(r"(^|/)(architectures|(torch_)?dtype|auto_map)$")
_LIBRARIES = {"torch", "transformers", "peft", "diffusers", "timm", "trl"}
_MOST = 256  # entries
_STEPS = (0, 1, 2, 10, 100, 1000, 10_000)  # at which functions of a schedule are asked


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
        made = hasattr(lr_scheduler, "step") or not callable(lr_scheduler)
        found |= describe_scheduler(lr_scheduler) if made else {}  # else when it is made
    return found


def describe_scheduler(scheduler: Any) -> dict[str, str]:
    """Of a schedule on its optimizer: its numbers, and what its functions (``LambdaLR``) give at some steps."""
    found = {}
    for number, function in enumerate(getattr(scheduler, "lr_lambdas", ())):
        with contextlib.suppress(Exception):  # one that counts its calls, or knows no such step
            found[f"lr_scheduler.lr_lambdas[{number}]"] = str([float(function(step)) for step in _STEPS])
    return found | {f"lr_scheduler.{name}": value for name, value in plain_texts(getattr(scheduler, "__dict__", {}))}


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
        yield from ((f"optimizer.defaults.{name}", value) for name, value in plain_texts(optimizer.defaults))
        yield from _of_groups(optimizer.param_groups, "optimizer")


def _of_groups(groups: Any, prefix: str) -> Iterator[tuple[str, str]]:
    yield f"{prefix}.groups", str(len(groups))
    for number, group in enumerate(groups):
        yield from ((f"{prefix}.groups[{number}].{name}", value) for name, value in plain_texts(group))


def plain_texts(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Numbers, texts and lists of them; parameters and what else an object keeps are no settings."""
    for name, value in values.items():
        if isinstance(value, dict | list | tuple) and len(value) > _MOST:  # a vocabulary, data
            continue
        if isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta:
            yield name, repr(value.item())
        elif isinstance(value, dict):
            yield from ((f"{name}[{key!r}]", text) for key, text in plain_texts({str(k): v for k, v in value.items()}))
        elif isinstance(value, _PLAIN) or (
            isinstance(value, list | tuple) and all(isinstance(each, _PLAIN) for each in value)
        ):
            yield name, repr(value)


def _name(value: Any) -> str:
    kind = value if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")) else type(value)
    return str(kind.__qualname__)


@torch.no_grad()
def describe_model(model: nn.Module) -> dict[str, str]:
    """Of its modules and parameters, with the numbers that modules of libraries keep: an epsilon, a probability."""
    found = {f"model {name}".rstrip(): type(module).__qualname__ for name, module in model.named_modules()}
    for name, param in model.named_parameters(remove_duplicate=False):
        trained = "" if param.requires_grad else ", frozen"
        dtype = str(param.dtype).removeprefix("torch.")
        found[f"parameter {name}"] = f"{list(logical_shape(param))} {dtype}{trained}"
    return found | describe_config(getattr(model, "config", None)) | _attributes(model, of_libraries=True)


def describe_users_modules(model: nn.Module) -> dict[str, str]:
    """The numbers that modules of other classes keep: those of one process may be among them."""
    return _attributes(model, of_libraries=False)


def describe_config(config: Any) -> dict[str, str]:
    """Of a model's configuration of transformers or diffusers."""
    values = config.to_dict() if callable(getattr(config, "to_dict", None)) else None
    leaves = _leaves(values) if isinstance(values, Mapping) else ()
    own = (_OF_A_PROCESS, _WRITTEN)
    return {f"config {name}": value for name, value in leaves if not any(kind.search(name) for kind in own)}


def describe_arguments(label: str, spec: Any) -> dict[str, str]:
    """Of a layer that is still to be built (``LayerSpec``): numbers, texts and configurations among its arguments."""
    given = {str(number): value for number, value in enumerate(getattr(spec, "module_args", ()))}
    given |= getattr(spec, "module_kwargs", {})
    found = {f"{label}: argument {name}": text for name, text in plain_texts(given) if not _OF_A_PROCESS.search(name)}
    for name, value in given.items():
        found |= {f"{label}: argument {name}: {key}": text for key, text in describe_config(value).items()}
    return found


def _attributes(model: nn.Module, *, of_libraries: bool) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        library = type(module).__module__.partition(".")[0]
        if library != "ds_hf" and (library in _LIBRARIES) is of_libraries:  # an engine's are of its process
            own = {key: value for key, value in vars(module).items() if not key.startswith("_")}
            found |= {
                f"{name}.{key}".lstrip("."): text for key, text in plain_texts(own) if not _OF_A_PROCESS.search(key)
            }
    return found
