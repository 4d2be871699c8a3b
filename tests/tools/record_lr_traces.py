"""Record what the real DeepSpeed's LR schedules write, for tests/engine/optim/schedules/test_schedules.py.

Not a test. Run it in an environment that has DeepSpeed (traces in the repository: 0.19.8) and not ds_hf:

    python tests/tools/record_lr_traces.py tests/data/lr_traces.json

Each trace holds, for update 0, 1, 2, ..., the learning rate (and betas) of every param group in force at that update.
"""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

import torch

STEPS = 64
LRS = [3e-4, 2e-3]
BETAS = [(0.9, 0.95), (0.85, 0.999)]


def make_optimizer(kind: str, groups: int) -> torch.optim.Optimizer:
    """One or two groups; the test builds the same."""
    params = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": LRS[i]} for i in range(groups)]
    if kind == "sgd":
        return torch.optim.SGD(params, lr=0.1)
    for group, betas in zip(params, BETAS, strict=False):
        group["betas"] = betas
    return torch.optim.Adam(params, lr=0.1)


def cases() -> list[dict[str, Any]]:
    """Every schedule over its parameters, scalars and lists, Adam and SGD, fresh and resumed."""
    found: list[dict[str, Any]] = []

    def add(name: str, params: dict[str, Any], groups: int = 1, kind: str = "adam", **more: Any) -> None:
        found.append({"name": name, "params": params, "groups": groups, "kind": kind, **more})

    for size, rate, stairs in itertools.product((1, 5, 7), (1.0, 5.0), (False, True)):
        params = {"lr_range_test_step_size": size, "lr_range_test_step_rate": rate, "lr_range_test_staircase": stairs}
        add("LRRangeTest", {"lr_range_test_min_lr": 1e-4, **params})
        add("LRRangeTest", {"lr_range_test_min_lr": [1e-4, 3e-4], **params}, groups=2)
    add("LRRangeTest", {})

    base = {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3}
    sizes = ((10, None), (10, 10), (10, 15), (7, 22), (13, 0), (1, 1), (20, 43))
    for (first, second), (stairs1, stairs2) in itertools.product(sizes, ((0, None), (3, None), (4, 2), (0, 5), (5, 0))):
        shape: dict[str, Any] = {"cycle_first_step_size": first, "cycle_first_stair_count": stairs1}
        if second is not None:
            shape["cycle_second_step_size"] = second
        if stairs2 is not None:
            shape["cycle_second_stair_count"] = stairs2
        decay = {"decay_step_size": 5, "decay_lr_rate": 0.5, "decay_mom_rate": 0.1}
        add("OneCycle", {**base, **shape, **decay})
    short = {"cycle_first_step_size": 6, "cycle_second_step_size": 9}
    for extra in (
        {"decay_step_size": 10},
        {"decay_step_size": 10, "decay_lr_rate": 0.3},
        {"decay_step_size": 10, "decay_mom_rate": 0.3},
        {"decay_lr_rate": 0.3, "decay_mom_rate": 0.3},
        {"cycle_momentum": False, "decay_step_size": 3, "decay_lr_rate": 1.0},
        {"cycle_min_mom": 0.7, "cycle_max_mom": 0.95},
    ):
        for kind in ("adam", "sgd"):
            add("OneCycle", {**base, **short, **extra}, kind=kind)
            add("OneCycle", {**base, **short, **extra}, groups=2, kind=kind)
    lists = {"cycle_min_lr": [1e-4, 1e-5], "cycle_max_lr": [1e-3, 1e-2]}
    add("OneCycle", {**lists, **short, "cycle_min_mom": [0.6, 0.7], "cycle_max_mom": [0.8, 0.95]}, groups=2)
    add("OneCycle", {**base, **short}, start=4)
    add("OneCycle", {**base, **short, "decay_step_size": 2, "decay_lr_rate": 0.1}, load=20)

    for kind, number in itertools.product(("log", "linear"), (1, 2, 10, 50, 100)):
        warm = {"warmup_type": kind, "warmup_num_steps": number}
        for low in (0, 1e-5):
            add("WarmupLR", {**warm, "warmup_min_lr": low, "warmup_max_lr": 1e-3})
            add("WarmupLR", {**warm, "warmup_min_lr": low}, groups=2)
            add("WarmupLR", {**warm, "warmup_min_lr": [low, 1e-4], "warmup_max_lr": [1e-3, 5e-4]}, groups=2)
        for total in (20, 60):
            decayed = {**warm, "total_num_steps": total}
            add("WarmupDecayLR", decayed)
            add("WarmupDecayLR", {**decayed, "warmup_min_lr": 1e-5, "warmup_max_lr": 3e-3}, groups=2)
            add("WarmupDecayLR", {**decayed, "warmup_max_lr": None}, groups=2)
            add("WarmupDecayLR", {**decayed, "warmup_min_lr": [0, 1e-5], "warmup_max_lr": [1e-3, 1e-2]}, groups=2)
            add("WarmupCosineLR", decayed)
            add("WarmupCosineLR", {**decayed, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.05}, groups=2)
            add("WarmupCosineLR", {**decayed, "cos_min_ratio": 0.0}, kind="sgd")
    add("WarmupLR", {})
    add("WarmupLR", {"warmup_type": "cosine", "warmup_num_steps": 9})
    for name, more in (
        ("WarmupLR", {}),
        ("WarmupDecayLR", {"total_num_steps": 50}),
        ("WarmupCosineLR", {"total_num_steps": 50}),
    ):
        add(name, {"warmup_num_steps": 10, **more}, start=5)
        add(name, {"warmup_num_steps": 10, **more}, load=30)
        add(name, {"warmup_num_steps": 10, **more}, jump=17)
    return found


def values_in_force(group: dict[str, Any], case: dict[str, Any]) -> list[float]:
    """The learning rate, and the betas where the schedule may write them."""
    betas = group.get("betas", ()) if case["name"] == "OneCycle" else ()
    return [group["lr"], *betas]


def _digits(value: float) -> float:
    return float(f"{value:.14g}")  # a smaller file; the test asks for 1e-12


def trace(schedule: Any, optimizer: torch.optim.Optimizer, case: dict[str, Any]) -> list[list[Any]]:
    """The values in force at each update; in update 3 ``load`` restores a counter, ``jump`` calls step(n)."""
    rows = []
    for step in range(STEPS):
        rows.append([[_digits(value) for value in values_in_force(group, case)] for group in optimizer.param_groups])
        if step == 3 and "load" in case:
            schedule.load_state_dict({"last_batch_iteration": case["load"]})
        if step == 3 and "jump" in case:
            schedule.step(case["jump"])
        else:
            schedule.step()
    return rows


def main(target: str) -> None:
    import deepspeed
    from deepspeed.runtime import lr_schedules

    out = []
    for case in cases():
        optimizer = make_optimizer(case["kind"], case["groups"])
        start = {"last_batch_iteration": case["start"]} if "start" in case else {}
        schedule = getattr(lr_schedules, case["name"])(optimizer, **case["params"], **start)
        out.append({**case, "trace": trace(schedule, optimizer, case)})
    lines = ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in out)
    with open(target, "w") as file:
        file.write(f'{{"deepspeed":"{deepspeed.__version__}","cases":[\n{lines}\n]}}\n')
    print(f"{len(out)} traces of {STEPS} updates in {target}")


if __name__ == "__main__":
    main(sys.argv[1])
