"""Difficulty over steps: the four schedules of curriculum learning, with DeepSpeed's numbers.

A section has ``min_difficulty`` (m), ``max_difficulty`` (M), ``schedule_type`` and ``schedule_config``:

- ``fixed_root``: ``m + (M - m) (step / T) ** (1 / root_degree)``, rounded down to a multiple of ``difficulty_step``, at
  least the first multiple that is not below m, at most M; T is ``total_curriculum_step``.
- ``fixed_linear``: the same with a ``root_degree`` of 1.
- ``fixed_discrete``: ``difficulty`` has a value more than ``max_step``; the first whose ``max_step`` is not passed yet.
- ``custom``: a function of the step.

Steps count from 1. A scheduler that has reached M stays there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from ds_hf.errors import ConfigError, Fault

__all__ = ["CurriculumScheduler", "schedule_faults"]

_FORMULAS = ("fixed_linear", "fixed_root")
_TYPES = (*_FORMULAS, "fixed_discrete", "custom")
_NEEDS = {
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "fixed_discrete": ("difficulty", "max_step"),
    "custom": (),
}


class CurriculumScheduler:
    """Gives the difficulty of a step.

    Attributes:
        state: settings and ``current_difficulty``, under the names of the section.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        if faults := list(schedule_faults(config)):
            raise ConfigError(faults, "curriculum")
        kind = config["schedule_type"]
        self.state: dict[str, Any] = {
            "min_difficulty": config["min_difficulty"],
            "max_difficulty": config["max_difficulty"],
            "current_difficulty": config["min_difficulty"],
            "schedule_type": kind,
        }
        if kind != "custom":
            self.state["schedule_config"] = dict(config["schedule_config"])
        self.custom_get_difficulty: Callable[[int], Any] | None = None

    def set_custom_get_difficulty(self, schedule_function: Callable[[int], Any]) -> None:
        """The function of a ``custom`` schedule: from a step, the first being 1, to its difficulty."""
        self.custom_get_difficulty = schedule_function

    def get_difficulty(self, global_steps: int) -> Any:
        """The difficulty of step ``global_steps`` by the schedule alone.

        Raises:
            ConfigError: the schedule is ``custom`` and has no function.
        """
        kind = self.state["schedule_type"]
        if kind == "custom":
            if self.custom_get_difficulty is None:
                raise ConfigError(
                    'the schedule is "custom" and has no function: call '
                    "engine.set_custom_curriculum_learning_schedule({metric: function of the step}) before training",
                    "curriculum",
                )
            found = self.custom_get_difficulty(global_steps)
            return found.item() if isinstance(found, np.number) else found
        settings = self.state["schedule_config"]
        if kind == "fixed_discrete":
            limits = settings["max_step"]
            place = next((index for index, limit in enumerate(limits) if global_steps <= limit), len(limits))
            return settings["difficulty"][place]
        return self._by_formula(global_steps, settings, 1 if kind == "fixed_linear" else settings["root_degree"])

    def _by_formula(self, step: int, settings: Mapping[str, Any], degree: float) -> Any:
        least, most, multiple = self.state["min_difficulty"], self.state["max_difficulty"], settings["difficulty_step"]
        share = (float(step) / settings["total_curriculum_step"]) ** (1.0 / degree)
        reached = math.floor(share * (most - least) + least)
        reached -= reached % multiple
        return min(max(reached, math.ceil(least / multiple) * multiple), most)

    def update_difficulty(self, global_steps: int) -> Any:
        """The difficulty of step ``global_steps``, which is kept; once the largest is reached it is not left again."""
        if self.state["current_difficulty"] < self.state["max_difficulty"]:
            self.state["current_difficulty"] = self.get_difficulty(global_steps)
        return self.state["current_difficulty"]

    def get_current_difficulty(self) -> Any:
        """What ``update_difficulty`` gave last."""
        return self.state["current_difficulty"]

    def set_current_difficulty(self, difficulty: Any) -> None:
        """Go on from ``difficulty``."""
        self.state["current_difficulty"] = difficulty

    def get_state(self) -> dict[str, Any]:
        """Settings and the current difficulty."""
        return self.state

    def set_state(self, state: dict[str, Any]) -> None:
        """Take what ``get_state`` gave."""
        self.state = state


def schedule_faults(config: Mapping[str, Any], base: str = "") -> Iterator[Fault]:
    """What is wrong with a section; ``base`` is the pointer of the section."""
    kind = config.get("schedule_type")
    for key in ("min_difficulty", "max_difficulty", "schedule_type"):
        if config.get(key) is None:
            yield Fault(f"{base}/{key}", f"curriculum learning needs {key}", f"add {key}")
    if kind is not None and kind not in _TYPES:
        yield Fault(f"{base}/schedule_type", f"there is no schedule {kind!r:.80}", f"give one of {', '.join(_TYPES)}")
        return
    numbers = {key: config.get(key) for key in ("min_difficulty", "max_difficulty")}
    for key, value in numbers.items():
        if value is not None and not (_is_number(value) and value > 0):
            yield Fault(f"{base}/{key}", f"{value!r:.80} is not a number above 0", "give the smallest and the largest")
            return
    least, most = numbers.values()
    if least is not None and most is not None and least > most:
        message = f"the difficulty begins at {least}, and its largest is {most}"
        yield Fault(f"{base}/min_difficulty", message, "give a min_difficulty that is not above max_difficulty")
    settings = config.get("schedule_config")
    if kind is None or kind == "custom":
        return
    if not isinstance(settings, Mapping):
        yield Fault(
            f"{base}/schedule_config", f"{kind} needs a schedule_config", f"add {', '.join(_NEEDS[kind])} to it"
        )
        return
    lacking = [key for key in _NEEDS[kind] if settings.get(key) is None]
    if lacking:
        message = f"{kind} needs {' and '.join(lacking)}"
        yield Fault(f"{base}/schedule_config", message, f"add {', '.join(lacking)} to schedule_config")
        return
    check = _discrete_faults if kind == "fixed_discrete" else _formula_faults
    yield from check(settings, f"{base}/schedule_config", most)


def _formula_faults(settings: Mapping[str, Any], base: str, most: Any) -> Iterator[Fault]:
    for key in ("total_curriculum_step", "difficulty_step", "root_degree"):
        value = settings.get(key)
        if value is not None and not (_is_number(value) and value > 0):
            yield Fault(f"{base}/{key}", f"{value!r:.80} is not a number above 0", "give a number above 0")
            return
    multiple = settings["difficulty_step"]
    if _is_number(most) and multiple > most:
        message = f"no multiple of difficulty_step {multiple} is as small as max_difficulty {most}"
        yield Fault(f"{base}/difficulty_step", message, "give a difficulty_step that divides max_difficulty")


def _discrete_faults(settings: Mapping[str, Any], base: str, most: Any) -> Iterator[Fault]:
    values, limits = settings["difficulty"], settings["max_step"]
    for key, found in (("difficulty", values), ("max_step", limits)):
        if not (isinstance(found, list | tuple) and found and all(map(_is_number, found))):
            yield Fault(f"{base}/{key}", f"{found!r:.80} is not a list of numbers", "give a list, such as [64, 128]")
            return
    if len(values) != len(limits) + 1:
        message = f"there are {len(values)} difficulties and {len(limits)} steps at which they end"
        fix = "give one max_step less than there are difficulties: the last difficulty has no end"
        yield Fault(f"{base}/max_step", message, fix)
    elif limits[0] < 1 or any(a >= b for a, b in pairwise(limits)):
        message = f"the steps {list(limits)} do not rise from 1 on"
        yield Fault(f"{base}/max_step", message, "give the last step of each difficulty, in order")
    elif min(values) <= 0:
        yield Fault(f"{base}/difficulty", f"{min(values)} is not above 0", "give difficulties above 0")
    elif _is_number(most) and max(values) > most:
        message = f"a difficulty of {max(values)} is above max_difficulty {most}"
        yield Fault(f"{base}/difficulty", message, "raise max_difficulty, or lower the difficulties")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
