"""What processes that train one model have to have in common, as names and values that ``Building.compare`` holds
against each other: the configuration, the optimizer and schedule, and the model.

Left out is what may differ: where a process writes and reads, and what it only prints or records.

What a script changes after ``initialize`` on some processes alone (a rate, what is frozen, clipping) is compared as
well: each process would go on with its own, and no collective shows it. So before some steps the first process leaves
its settings in the store of the process group, and the others compare theirs of that step when they find them there
(``Drift``): nothing is sent beside training, and no process waits for another.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import re
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ds_hf.config.types import Config
from ds_hf.engine.comm.together import difference, open_store
from ds_hf.engine.zero.buffer import logical_shape
from ds_hf.log import warn_once

__all__ = [
    "Drift",
    "attach",
    "describe_arguments",
    "describe_config",
    "describe_listed",
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
    if isinstance(value, _PLAIN):  # nearly all are, and the questions below take longer
        yield prefix, repr(value)
        return
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
        if _is_common(name):
            yield from _leaves(each, f"{prefix}/{name.rstrip('_')}" if prefix else name.rstrip("_"))


@functools.lru_cache(4096)
def _is_common(name: str) -> bool:
    return name not in _OWN and not _PLACES.search(name)


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
    found |= {f"parameter {name} is tied to": first for name, first in _tied(model)}
    return found | describe_config(getattr(model, "config", None)) | _attributes(model, of_libraries=True)


def _tied(model: nn.Module) -> Iterator[tuple[str, str]]:
    first: dict[int, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(param), name) != name:
            yield name, first[id(param)]


def describe_listed(model: nn.Module, optimizer: Any, model_parameters: Any) -> dict[str, str]:
    """The group in which an optimizer, or who asks for one, lists each parameter."""
    listed = optimizer.param_groups if isinstance(optimizer, Optimizer) else model_parameters
    if not isinstance(listed, list | tuple):
        return {}
    groups = listed if listed and isinstance(listed[0], dict) else [{"params": listed}]
    group_of: dict[int, int] = {}
    for number, group in enumerate(groups):
        params = group.get("params") if isinstance(group, dict) else None
        for item in params if isinstance(params, list | tuple) else [params]:
            group_of[id(item[-1] if isinstance(item, list | tuple) and item else item)] = number
    named = model.named_parameters(remove_duplicate=False)
    return {f"group of {name}": str(group_of[id(param)]) for name, param in named if id(param) in group_of}


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


# -- what a script changes later ----------------------------------------------------------------------------------

_MOST = 64  # steps between comparisons; at first each comes after twice as many
_TRAINS = "which train"
_NEVER = 0


def attach(engine: Any) -> None:
    """Compare the settings of ``engine``, which is being built, with those of the processes that should have the
    same."""
    axis = engine.mesh.replicas if engine.mesh.shape.pipe > 1 or engine.mesh.is_given else engine.mesh.world
    store = open_store()
    if store is not None and axis.world_size > 1:
        drift = Drift(engine, store, [axis.global_rank(rank) for rank in range(axis.world_size)])
        engine.unfreezing.compare_settings = drift.look


class Drift:
    """Of one engine on one process.

    Args:
        store: of this engine alone.
        ranks: processes whose settings are the same.
    """

    def __init__(self, engine: Any, store: Any, ranks: Sequence[int]) -> None:
        self._engine, self._store, self._first, self._rank = weakref.ref(engine), store, ranks[0], dist.get_rank()
        self._step = self._gap = 0
        self._due = 1
        self._mine: tuple[str, dict[str, str]] | None = None  # waits for the first process'
        self._left: list[str] = []

    def look(self) -> int:
        """Before a step; before which later one it wants to look again, as a number of steps."""
        engine, self._step = self._engine(), self._step + self._gap
        self._gap = _NEVER
        if engine is None:
            return self._gap
        with contextlib.suppress(RuntimeError):  # the store is gone, and with it the process that kept it
            if self._mine is not None and self._store.check([self._mine[0]]):
                self._compare(engine, *self._mine)
                self._mine = None
            if self._step >= self._due - 1:
                self._due += min(self._due, _MOST)
                self._take(engine, f"{self._first}/{self._step}")
            self._gap = 1 if self._mine is not None else self._due - 1 - self._step
        return self._gap

    def _take(self, engine: Any, key: str) -> None:
        mine = settings_of(engine)
        if self._rank != self._first:
            self._mine = key, mine
            return
        self._store.set(key, zlib.compress(json.dumps(mine).encode()))
        self._left.append(key)
        if len(self._left) > 8:  # no process is so far behind
            self._store.delete_key(self._left.pop(0))

    def _compare(self, engine: Any, key: str, mine: dict[str, str]) -> None:
        first = json.loads(zlib.decompress(self._store.get(key)))
        if first == mine:
            return
        names = list(engine.param_names.values())
        first, mine = (_by_name(each, names) for each in (first, mine))
        warn_once(
            f"before step {int(key.partition('/')[2]) + 1}: {difference(first, mine, self._first, self._rank)}. Each "
            "process trains with its own (said once), so that their parts of the model do not fit together: let the "
            "script change settings on all processes alike, or none",
            about="settings that part",
            everywhere=True,
        )


def settings_of(engine: Any) -> dict[str, str]:
    """What a script may change, as it is now."""
    optimizer = engine.optimizer
    assert optimizer is not None
    found = {"gradient_clipping": repr(optimizer.policy.max_norm), "loss scale": repr(optimizer.loss_scaler.scale)}
    found |= {"gradient_accumulation_steps": repr(engine.accumulation.steps), "batch": repr(tuple(engine.batch))}
    found["model.training"] = repr(engine.module.training)
    options = {*optimizer.defaults, "lr", "initial_lr"} - {"params"}
    places = {key: place for place, key in enumerate(engine.param_names)}  # processes may have other experts
    for number, (group, params) in enumerate(zip(optimizer.param_groups, optimizer.given, strict=False)):
        chosen = {name: value for name, value in group.items() if name in options}
        found |= {f"param_groups[{number}].{name}": text for name, text in plain_texts(chosen)}
        members = repr(sorted(places.get(id(param), -1) for param in params))
        digest = blake2b(members.encode(), digest_size=4).hexdigest()
        found[f"param_groups[{number}]['params']"] = f"{len(params)} parameters ({digest})"
    trains = {id(param): param.requires_grad for param in engine.module.parameters()}
    found[_TRAINS] = "".join(str(int(trains.get(key, False))) for key in engine.param_names)
    return found


def _by_name(settings: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """With an entry for each parameter in the place of one for all."""
    flags = zip(names, settings[_TRAINS], strict=False)
    rest = {name: text for name, text in settings.items() if name != _TRAINS}
    return {**rest, **{f"{name}.requires_grad": str(flag == "1") for name, flag in flags}}
