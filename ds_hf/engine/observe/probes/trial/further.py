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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.optim import Optimizer

from ds_hf.measure.protocol import TRIAL_ENV, TrialRequest, further_file
from ds_hf.measure.saving import leave
from ds_hf.regular_files import read_object

if TYPE_CHECKING:
    from ds_hf.engine.engine import CoreEngine

__all__ = ["Given", "changed", "follow"]

POLL_SECONDS = 0.02
LONGEST_WAIT_S = 900.0  # for a request: whoever would send one is gone


class Given:
    """What ``initialize`` was given, for engines made later: an engine rewrites the groups of an optimizer.

    Attributes:
        arguments: by keyword; parameters that can be read once only are a list.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        parameters = arguments["model_parameters"]
        self.arguments = {**arguments, "model_parameters": None if parameters is None else list(parameters)}
        self._parameters = _copied(self.arguments["model_parameters"])
        optimizer = arguments["optimizer"]
        self._groups = _copied(optimizer.param_groups) if isinstance(optimizer, Optimizer) else None

    def again(self) -> dict[str, Any]:
        """The same, with an optimizer as it was; without what one engine alone needs."""
        optimizer = self.arguments["optimizer"]
        if self._groups is not None:
            old, optimizer = optimizer, object.__new__(type(optimizer))
            optimizer.__dict__.update(vars(old), param_groups=_copied(self._groups), state=defaultdict(dict))
        own = {"training_data": None, "lr_scheduler": None, "compiled": False}
        return {**self.arguments, **own, "optimizer": optimizer, "model_parameters": _copied(self._parameters)}


def _copied(groups: list[Any] | None) -> list[Any] | None:
    """Parameters, or groups of them that may be changed."""
    if groups is None:
        return None
    return [{**each, "params": list(each["params"])} if isinstance(each, dict) else each for each in groups]


def follow(engine: CoreEngine, request: TrialRequest, measure: Callable[[CoreEngine], None]) -> NoReturn:
    """Let each further request be measured, until nobody asks any more.

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
    engine.destroy()
    torch.compiler.reset()
    gc.collect()
    if engine.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(engine.device)
    made = make(config)
    made.remake = make
    made.train()
    return made


def changed(given: Mapping[str, Any], old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """``given``, which a program made of the file ``old``, as it would have made it of ``new``: what differs between
    the files is put into it, and what the program filled in stays."""
    found = dict(given)
    for key in old.keys() | new.keys():
        before, after = old.get(key), new.get(key)
        if before == after:
            continue
        if key not in new:
            found.pop(key, None)
        elif isinstance(after, Mapping) and isinstance(found.get(key, {}), Mapping):
            found[key] = changed(found.get(key, {}), before if isinstance(before, Mapping) else {}, after)
        else:
            found[key] = after
    return found
