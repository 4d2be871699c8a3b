"""Further settings in the processes of a trial: the engine makes way for another one around the same module.

What a launch costs is mostly its start: Python, the libraries, the script's model and data. So where only keys differ
that the engine alone reads, the autotuner asks the processes that are there, by files that are numbered; all of them
read the same ones. Weights keep their values, since trials train at a rate of 0, and the batch is the one that the
script gave.
"""

from __future__ import annotations

import gc
import itertools
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from ds_hf.errors import ConfigError
from ds_hf.measure.protocol import TRIAL_ENV, TrialRequest, further_file
from ds_hf.measure.saving import leave
from ds_hf.regular_files import read_object

if TYPE_CHECKING:
    from ds_hf.engine.engine import CoreEngine

__all__ = ["Given", "changed", "follow"]

POLL_SECONDS = 0.02
LONGEST_WAIT_S = 900.0  # for the next request; by then the autotuner must have ended


class Given:
    """What ``initialize`` was given, for engines made later: an engine rewrites the groups of an optimizer.

    Attributes:
        arguments: by keyword; parameters that can be read once only, also those of a group, are a list.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._parameters = _copied(arguments["model_parameters"])
        self.arguments = {**arguments, "model_parameters": _copied(self._parameters)}
        optimizer = arguments["optimizer"]
        self._optimizer = _AsItWas(optimizer) if isinstance(optimizer, Optimizer) else None

    def again(self) -> dict[str, Any]:
        """The same, with the optimizer as it was; without what one engine alone needs."""
        if self._optimizer is not None:
            self._optimizer.restore()
        own = {"training_data": None, "lr_scheduler": None}
        return {**self.arguments, **own, "model_parameters": _copied(self._parameters)}


class _AsItWas:
    """The groups and states of an optimizer that engines change, to be put back into the same object: a scheduler has
    replaced its ``step`` by one that calls this object's, and others hold its groups."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._groups = [(group, _group(group)) for group in optimizer.param_groups]
        # Adagrad makes its sums at construction: they are kept where they take nothing of the device.
        self._state = {param: _on(state, torch.device("cpu")) for param, state in optimizer.state.items()}

    def restore(self) -> None:
        for group, kept in self._groups:
            group.clear()
            group.update(_group(kept))
        self.optimizer.param_groups[:] = [group for group, _ in self._groups]
        self.optimizer.state = defaultdict(dict)
        for param, state in self._state.items():
            self.optimizer.state[param] = _on(state, param.device)


def _on(state: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """A copy of a parameter's state; counters of one number are on the host."""
    return {
        key: value.to(device if value.dim() else "cpu", copy=True) if isinstance(value, Tensor) else value
        for key, value in state.items()
    }


def _copied(groups: Iterable[Any] | None) -> list[Any] | None:
    """Parameters, or groups of them that may be changed."""
    return None if groups is None else [_group(each) if isinstance(each, dict) else each for each in groups]


def _group(group: dict[str, Any]) -> dict[str, Any]:
    params = group["params"]
    return {**group, "params": params if isinstance(params, Tensor) else list(params)}


def follow(engine: CoreEngine, request: TrialRequest, measure: Callable[[CoreEngine], None]) -> NoReturn:
    """Serve one request after another, and end the process after the last.

    Args:
        request: of ``engine``, which has measured it. measure: is given the engine of each further one.
    """
    path, given = Path(os.environ[TRIAL_ENV]), engine.config
    started = read_object(str(request.config))
    for number in itertools.count(request.further):
        file = _awaited(further_file(path, number))
        os.environ[TRIAL_ENV] = str(file)  # which the next engine reads
        request = TrialRequest.read(file)
        engine = _remade(engine, changed(given, started, read_object(str(request.config))))
        measure(engine)
        if not request.further:
            break
    leave(0)


def _awaited(path: Path) -> Path:
    end, parent = time.monotonic() + LONGEST_WAIT_S, os.getppid()
    while not path.exists():
        if time.monotonic() > end or os.getppid() != parent:
            leave(0)
        time.sleep(POLL_SECONDS)
    return path


def _remade(engine: CoreEngine, config: dict[str, Any]) -> CoreEngine:
    make = engine.remake
    assert make is not None
    modes = {module: module.training for module in engine.module.modules()}  # some keep parts from training
    engine.destroy()
    torch.compiler.reset()
    gc.collect()
    if engine.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(engine.device)
    made = make(config)
    made.remake = make
    made.train()
    for module, training in modes.items():
        module.training = training
    return made


def changed(given: Mapping[str, Any], old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """``given``, which a program made of the file ``old``, as it would have made it of ``new``: what differs between
    the files is put into it, and what the program filled in stays.

    Raises:
        ConfigError: the program sets a key itself that differs between the files: its new value cannot be known.
    """
    found = dict(given)
    for key in old.keys() | new.keys():
        before, after = old.get(key), new.get(key)
        if before == after:
            continue
        if isinstance(after, Mapping) and isinstance(found.get(key, {}), Mapping):
            found[key] = changed(found.get(key, {}), before if isinstance(before, Mapping) else {}, after)
            continue
        if before != "auto" and found.get(key) != before:
            raise ConfigError(f"the script itself gives {key} a value: it has to start again for another one")
        if key in new:
            found[key] = after
        else:
            found.pop(key, None)
    return found
