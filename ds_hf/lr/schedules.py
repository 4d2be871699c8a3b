"""A learning rate as schedules: DeepSpeed's ``scheduler`` blocks and the Trainer arguments that mean the same.

1Cycle follows Smith (2018): it starts at a 25th of the peak, rises for 30 % of the training, and momentum moves
against it. DeepSpeed's OneCycle sets Adam's beta2 to 0.99 for good (``ds_hf.compat_schedules: "strict"`` keeps the
user's); its warm-ups are logarithmic by default, those of transformers are linear.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Advice", "advise"]

WARMUP = 0.06  # of the training
RISE = 0.3  # of the training, for 1Cycle
DEPTH = 25  # peak over start of 1Cycle
LEAST_MOMENTUM, MOST_MOMENTUM = 0.85, 0.95
AUTO = "auto"  # the Trainer fills it in


@dataclass(frozen=True)
class Advice:
    """One schedule.

    Attributes:
        name: DeepSpeed's name of it.
        config: the keys of a DeepSpeed file, to be merged into the user's.
        arguments: of a script with the Trainer, as on a command line; empty where transformers has nothing alike.
        note: what to know.
    """

    name: str
    config: dict[str, Any]
    arguments: list[str] = field(default_factory=list)
    note: str = ""


def advise(lr: float, total_steps: int | None, *, cycles_momentum: bool) -> list[Advice]:
    """Every schedule, for a peak of ``lr`` and a training of ``total_steps`` updates.

    Without ``total_steps`` numbers of steps are "auto", which only the Trainer fills in, and there is no 1Cycle.
    """
    peak = _rounded(lr)
    warm: Any = AUTO if total_steps is None else min(max(2, math.ceil(WARMUP * total_steps)), total_steps)
    total: Any = AUTO if total_steps is None else total_steps
    ramp = {"warmup_min_lr": 0, "warmup_max_lr": peak, "warmup_num_steps": warm, "warmup_type": "linear"}
    cosine = {"warmup_min_ratio": 0, "warmup_num_steps": warm, "cos_min_ratio": 0.0001, "warmup_type": "linear"}
    found = [
        Advice("WarmupDecayLR", _config("WarmupDecayLR", {**ramp, "total_num_steps": total}, peak),
               _arguments(peak, "linear", total_steps, WARMUP)),
        Advice("WarmupCosineLR", _config("WarmupCosineLR", {**cosine, "total_num_steps": total}, peak),
               _arguments(peak, "cosine", total_steps, WARMUP), "its peak is the optimizer's own learning rate"),
        Advice("WarmupLR", _config("WarmupLR", ramp, peak),
               _arguments(peak, "constant_with_warmup", total_steps, WARMUP),
               "without a decay: the rate was confirmed with one, so expect a somewhat lower one to do better"),
    ]  # fmt: skip
    if total_steps is not None and total_steps >= 2:
        found.append(_one_cycle(peak, total_steps, cycles_momentum))
    return found


def _one_cycle(peak: float, total_steps: int, cycles_momentum: bool) -> Advice:
    first = min(max(1, round(RISE * total_steps)), total_steps - 1)
    params: dict[str, Any] = {
        "cycle_min_lr": _rounded(peak / DEPTH),
        "cycle_max_lr": peak,
        "cycle_first_step_size": first,
        "cycle_second_step_size": total_steps - first,
        "cycle_momentum": cycles_momentum,
    }
    note = "transformers has no 1Cycle: a linear warm-up as long, and a linear decay, are nearest"
    if cycles_momentum:
        params |= {"cycle_min_mom": LEAST_MOMENTUM, "cycle_max_mom": MOST_MOMENTUM}
        note += '; OneCycle sets beta2 to 0.99 unless "ds_hf": {"compat_schedules": "strict"}'
    return Advice("OneCycle", _config("OneCycle", params, peak), _arguments(peak, "linear", total_steps, RISE), note)


def _config(name: str, params: dict[str, Any], peak: float) -> dict[str, Any]:
    return {"optimizer": {"params": {"lr": peak}}, "scheduler": {"type": name, "params": params}}


def _arguments(peak: float, kind: str, total_steps: int | None, warmup: float) -> list[str]:
    """transformers 5 takes a share of the training for ``--warmup_steps``; 4 calls that ``--warmup_ratio``."""
    steps = warmup if total_steps is None else max(1, math.ceil(warmup * total_steps))
    return ["--learning_rate", f"{peak:g}", "--lr_scheduler_type", kind, "--warmup_steps", f"{steps:g}"]


def _rounded(lr: float) -> float:
    """To three digits: more are not known."""
    return float(f"{lr:.3g}")
