"""The five learning-rate schedules of DeepSpeed's JSON, value for value, and a strict variant of each.

Update k (0-based) runs at what stands in ``param_groups`` when the optimizer steps: the constructor writes the value
for update 0 (``last_batch_iteration`` is -1); ``step()`` after update k sets ``last_batch_iteration`` to t = k and
writes the value for update k + 1. ``mode="deepspeed"`` (default) equals DeepSpeed 0.19 in every value, oddities
included; ``mode="strict"`` has no update at a learning rate of zero, reaches every peak, keeps the user's beta2 and
keeps beta1 below 1. Schedules read ``optimizer.param_groups`` anew at each write: groups may be replaced.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer

from ds_hf.engine.optim.schedules.ramp import DeepSpeedRamp, Ramp, StrictRamp
from ds_hf.log import warn_once

__all__ = [
    "LRRangeTest",
    "OneCycle",
    "Schedule",
    "ScheduleMode",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "tell_replaced",
    "torch_optimizer",
]

ScheduleMode = Literal["deepspeed", "strict"]

_BETA1_CAP = 0.99  # strict mode: beta1 of 1 or more makes Adam diverge


class Schedule(ABC):
    """What the five have in common: one counter, and lists with one value for each param group."""

    def __init__(self, optimizer: Any, last_batch_iteration: int, mode: ScheduleMode) -> None:
        if mode not in ("deepspeed", "strict"):
            raise ValueError(f'mode must be "deepspeed" or "strict", got {mode!r}')
        self.optimizer = torch_optimizer(optimizer)
        self.mode = mode
        self.last_batch_iteration = last_batch_iteration

    @abstractmethod
    def get_lr(self) -> list[float]:
        """The learning rates that follow from ``last_batch_iteration``, one for each param group."""

    def get_last_lr(self) -> list[float]:
        """The learning rates in force, also before the first step and after a checkpoint was loaded."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def step(self, batch_iteration: int | None = None) -> None:
        """Advance by one (or to ``batch_iteration``) and write the values into the optimizer."""
        self.last_batch_iteration = self.last_batch_iteration + 1 if batch_iteration is None else batch_iteration
        self._write(self.get_lr())

    def state_dict(self) -> dict[str, int]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: dict[str, int]) -> None:
        """Restore the counter; as in DeepSpeed the optimizer's own checkpoint restores the values in force."""
        self.last_batch_iteration = sd["last_batch_iteration"]

    def _write(self, lrs: Sequence[float]) -> None:
        for group, lr in zip(self.optimizer.param_groups, lrs, strict=False):
            if isinstance(group["lr"], Tensor):  # a captured graph holds this very tensor
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def _per_group(self, key: str, value: float | Sequence[float], *, replaces: bool = False) -> list[float]:
        """``replaces``: these are the rates with which the groups train, in place of their own."""
        count = len(self.optimizer.param_groups)
        if not isinstance(value, list | tuple):
            if replaces:
                tell_replaced(self.get_last_lr(), f"{type(self).__name__}'s {key} {value}")
            return [value] * count  # type: ignore[list-item]
        if len(value) != count:
            raise ValueError(
                f"{key} has {len(value)} values, but the optimizer has {count} param group(s); "
                "give one number for all groups, or one for each"
            )
        return list(value)


def tell_replaced(rates: Sequence[float], by: str) -> None:
    """Say that one rate takes the place of several: of param groups, Muon's ``muon_lr`` and ``adam_lr``, LoRA+'s."""
    if len(set(rates)) > 1:
        found = ", ".join(f"{rate:g}" for rate in dict.fromkeys(rates))
        warn_once(
            f"the optimizer's param groups have the learning rates {found}, but {by} takes the place of all of them: "
            "give the schedule a list with one rate for each group, or use WarmupCosineLR, which scales each group's "
            "own rate"
        )


class LRRangeTest(Schedule):
    """Grow the learning rate from a minimum, linearly or in stairs, to find where training diverges."""

    def __init__(
        self,
        optimizer: Any,
        lr_range_test_min_lr: float | Sequence[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
        *,
        mode: ScheduleMode = "deepspeed",
    ) -> None:
        super().__init__(optimizer, last_batch_iteration, mode)
        self.min_lr = self._per_group("lr_range_test_min_lr", lr_range_test_min_lr, replaces=True)
        self.step_size = _whole("lr_range_test_step_size", lr_range_test_step_size, 1)
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        if last_batch_iteration == -1:
            self._write(self.min_lr)

    def get_lr(self) -> list[float]:
        interval = (self.last_batch_iteration + 1) / self.step_size
        growth = 1 + self.step_rate * (math.floor(interval) if self.staircase else interval)
        return [lr * growth for lr in self.min_lr]


class OneCycle(Schedule):
    """One rise and fall of the learning rate, Adam's beta1 moving against it, then an optional decay of both."""

    def __init__(
        self,
        optimizer: Any,
        cycle_min_lr: float | Sequence[float],
        cycle_max_lr: float | Sequence[float],
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: float = 2000,
        cycle_second_step_size: float | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: float = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float | Sequence[float] = 0.8,
        cycle_max_mom: float | Sequence[float] = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
        *,
        mode: ScheduleMode = "deepspeed",
    ) -> None:
        super().__init__(optimizer, last_batch_iteration, mode)
        self.first_step_size, self.second_step_size = _cycle_sizes(cycle_first_step_size, cycle_second_step_size)
        self.total_size = self.first_step_size + self.second_step_size
        self.step_ratio = self.first_step_size / self.total_size
        self.first_stair_count = cycle_first_stair_count
        self.second_stair_count = (
            cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        )
        if decay_step_size < 0:
            raise ValueError(f"decay_step_size must not be negative, got {decay_step_size}; 0 means no decay")
        self.decay_step_size = decay_step_size
        self.decay_lr_rate = decay_lr_rate
        self.decay_mom_rate = decay_mom_rate
        self.min_lrs = self._per_group("cycle_min_lr", cycle_min_lr)
        self.max_lrs = self._per_group("cycle_max_lr", cycle_max_lr, replaces=True)
        self.min_moms = self._per_group("cycle_min_mom", cycle_min_mom)
        self.max_moms = self._per_group("cycle_max_mom", cycle_max_mom)
        self.cycle_momentum = cycle_momentum and self._has_betas()
        if mode == "deepspeed" and self.cycle_momentum:
            self._tell_growth()
        if last_batch_iteration == -1:
            self._write(self.min_lrs)
            # DeepSpeed starts at the low end, although its own formula gives the high end here.
            self._write_mom(self.min_moms if mode == "deepspeed" else self.max_moms)

    def get_lr(self) -> list[float]:
        if self._in_cycle():
            rise = self._rise()
            return [low + (high - low) * rise for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]
        growth = self._growth(self.decay_lr_rate)
        return [lr / growth for lr in self.min_lrs]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """The betas of each param group, or None when momentum is not cycled."""
        if not self.cycle_momentum:
            return None
        return [self._betas(i, mom) for i, mom in enumerate(self._moms())]

    def step(self, batch_iteration: int | None = None) -> None:
        """Advance and write learning rates and betas."""
        super().step(batch_iteration)
        self._write_mom(self._moms())

    def _moms(self) -> list[float]:
        if self._in_cycle():
            rise = self._rise()
            return [high - (high - low) * rise for low, high in zip(self.min_moms, self.max_moms, strict=True)]
        growth = self._growth(self.decay_mom_rate)
        return [mom * growth for mom in self.max_moms]

    def _write_mom(self, moms: Sequence[float]) -> None:
        if self.cycle_momentum:
            for i, (group, mom) in enumerate(zip(self.optimizer.param_groups, moms, strict=False)):
                group["betas"] = self._betas(i, mom)

    def _betas(self, index: int, mom: float) -> tuple[float, float]:
        if self.mode == "deepspeed":
            return mom, 0.99
        cap = max(_BETA1_CAP, self.max_moms[index])
        return min(mom, cap), self.optimizer.param_groups[index]["betas"][1]

    def _tell_growth(self) -> None:
        """DeepSpeed's formula lets beta1 grow without end."""
        highest = max(self.max_moms)
        if self.decay_mom_rate <= 0 or self.decay_step_size <= 0 or highest <= 0:
            return
        past = max(1, math.ceil((1 / highest - 1) / self.decay_mom_rate * self.decay_step_size - 1e-9))
        warn_once(
            f"OneCycle: decay_mom_rate {self.decay_mom_rate:g} lets beta1 grow after the cycle, as in DeepSpeed: after "
            f"{self.total_size + past:g} steps it is 1 or more, with which Adam does not train or ends in nan. "
            'Set decay_mom_rate to 0, or {"ds_hf": {"compat_schedules": "strict"}}, which stops at '
            f"{_BETA1_CAP}"
        )

    def _has_betas(self) -> bool:
        if "betas" in self.optimizer.defaults:
            return True
        name = type(self.optimizer).__name__
        warn_once(f"OneCycle: {name} has no betas, so its momentum is not cycled; set cycle_momentum to false")
        return False

    def _in_cycle(self) -> bool:
        return self.last_batch_iteration < self.total_size

    def _growth(self, rate: float) -> float:
        """The factor of the decay after the cycle; 1 when there is none."""
        if math.isclose(self.decay_step_size, 0) or math.isclose(rate, 0):
            return 1.0
        past = self.last_batch_iteration - self.total_size + 1
        return 1 + rate * (past / self.decay_step_size)

    def _rise(self) -> float:
        """How far up the cycle stands: 0 at its ends, 1 at the peak."""
        done = self.last_batch_iteration + 1
        turns = done / self.total_size
        position = 1.0 + turns - math.floor(1 + turns)
        peak = self.step_ratio
        rising = position <= peak
        stairs = self.first_stair_count if rising else self.second_stair_count
        if stairs > 0:
            # From whole steps, since a position of 1 - 1e-16 would be floored a whole stair too low.
            offset = done % self.total_size
            if offset <= self.first_step_size:
                return math.floor(offset * stairs / self.first_step_size) / stairs
            return math.floor((self.total_size - offset) * stairs / self.second_step_size) / stairs
        return position / peak if rising else (position - 1) / (peak - 1)


class _WarmupSchedule(Schedule):
    """A warm-up followed by something."""

    def __init__(
        self, optimizer: Any, warmup_num_steps: int, warmup_type: str, last_batch_iteration: int, mode: ScheduleMode
    ) -> None:
        super().__init__(optimizer, last_batch_iteration, mode)
        steps = _whole("warmup_num_steps", warmup_num_steps, 0)
        if warmup_type not in ("log", "linear"):
            problem = f'warmup_type must be "log" or "linear", got {warmup_type!r}'
            if mode == "strict":
                raise ValueError(problem)
            warn_once(f'{problem}; "log" is used, as DeepSpeed does')
            warmup_type = "log"
        if mode == "deepspeed" and steps < 2:
            warn_once(f"warmup_num_steps {steps} is treated as 2, DeepSpeed's shortest warm-up")
        make = DeepSpeedRamp if mode == "deepspeed" else StrictRamp
        self._ramp: Ramp = make(steps, warmup_type == "log")
        self.warmup_num_steps = max(2, steps) if mode == "deepspeed" else steps
        self.warmup_type = warmup_type

    def _check_total(self, total_num_steps: int) -> int:
        total = _whole("total_num_steps", total_num_steps, 1)
        if total < self.warmup_num_steps:
            problem = (
                f"warmup_num_steps {self.warmup_num_steps} is more than total_num_steps {total}: the run ends before "
                "the warm-up does; lower warmup_num_steps, or raise total_num_steps"
            )
            if self.mode == "strict":
                raise ValueError(problem)
            warn_once(problem)  # short trial runs of a long configuration are common and work with DeepSpeed
        return total


class WarmupLR(_WarmupSchedule):
    """Warm up from ``warmup_min_lr`` to ``warmup_max_lr`` (None: the optimizer's own), then stay there."""

    def __init__(
        self,
        optimizer: Any,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
        *,
        mode: ScheduleMode = "deepspeed",
    ) -> None:
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration, mode)
        if warmup_max_lr is None:
            warmup_max_lr = self.get_last_lr()
        self.min_lrs = self._per_group("warmup_min_lr", warmup_min_lr)
        self.max_lrs = self._per_group("warmup_max_lr", warmup_max_lr, replaces=True)
        if last_batch_iteration == -1:
            self._write(self.get_lr())

    def get_lr(self) -> list[float]:
        t = self.last_batch_iteration
        height = self._ramp.fraction(t) if self._ramp.warming(t) else self._after(t)
        return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def _after(self, t: int) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    """Warm up, then decay linearly to ``warmup_min_lr`` at ``total_num_steps``."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
        *,
        mode: ScheduleMode = "deepspeed",
    ) -> None:
        self.total_num_steps = total_num_steps  # the parent's constructor may ask for the first value
        super().__init__(
            optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration, mode=mode
        )
        self.total_num_steps = self._check_total(total_num_steps)

    def _after(self, t: int) -> float:
        return self._ramp.left(t, self.total_num_steps)


class WarmupCosineLR(_WarmupSchedule):
    """Warm up to each group's own learning rate, then follow half a cosine down to ``cos_min_ratio`` of it."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
        *,
        mode: ScheduleMode = "deepspeed",
    ) -> None:
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration, mode)
        self.total_num_steps = self._check_total(total_num_steps)
        self.warmup_min_ratio = warmup_min_ratio
        self.cos_min_ratio = cos_min_ratio
        self.org_lrs = self.get_last_lr()
        if last_batch_iteration == -1:
            self._write(self.get_lr())

    def get_lr(self) -> list[float]:
        ratio = self.get_lr_ratio()
        return [lr * ratio for lr in self.org_lrs]

    def get_lr_ratio(self) -> float:
        """The share of each group's learning rate."""
        t = self.last_batch_iteration
        if t < 0 and self.mode == "deepspeed":
            return 0.0  # whatever warmup_min_ratio says
        if self._ramp.warming(t):
            return self.warmup_min_ratio + self._ramp.fraction(t) * (1.0 - self.warmup_min_ratio)
        wave = (1 + math.cos(math.pi * self._ramp.progress(t, self.total_num_steps))) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * wave)


def torch_optimizer(optimizer: Any) -> Optimizer:
    """The torch optimizer in ``optimizer``: itself, the one that a wrapper holds, or whatever has live param groups."""
    for candidate in (optimizer, getattr(optimizer, "optimizer", None)):
        if isinstance(candidate, Optimizer):
            return candidate
    if hasattr(optimizer, "param_groups") and hasattr(optimizer, "defaults"):
        return optimizer  # type: ignore[no-any-return]
    raise TypeError(f"{type(optimizer).__name__} is not a torch.optim.Optimizer and does not wrap one")


def _whole(key: str, value: Any, least: int) -> int:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value != int(value) or value < least:
        raise ValueError(f"{key} must be a whole number of at least {least}, got {value!r}")
    return int(value)


def _cycle_sizes(first: float, second: float | None) -> tuple[float, float]:
    if first <= 0:
        raise ValueError(f"cycle_first_step_size must be positive, got {first}")
    if second is None:
        return float(first), float(first)
    if second < 0:
        raise ValueError(
            f"cycle_second_step_size must not be negative, got {second}; leave it out to use cycle_first_step_size"
        )
    return float(first), float(second)
