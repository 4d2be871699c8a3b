"""Record the loss scales of the real DeepSpeed's DynamicLossScaler and FP16_Optimizer.

They are for tests/engine/optim/test_loss_scaler.py.

Not a test. Run it in an environment that has DeepSpeed (traces in the repository: 0.19.8) and not ds_hf:

    python tests/tools/record_loss_scale_traces.py tests/data/loss_scale_traces.json

``cases`` are those of ZeRO, ``stage0`` those without it.
In each trace ``overflows`` has one character a boundary ("1": gradients overflowed), ``scales`` is the scale after
each; a run that DeepSpeed ends at the minimal scale has ``raised``, and the trace stops there.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from typing import Any


def cases() -> list[dict[str, Any]]:
    """Settings and overflow patterns: rare, frequent, bursts, and one that reaches the minimum."""
    found = []
    settings = itertools.product((0, 4, 16), (1, 3, 10), (1, 2, 3), (False, True), (1, 4))
    for index, (power, window, hysteresis, consecutive, minimum) in enumerate(settings):
        draw = random.Random(index)
        chance = (0.05, 0.2, 0.5)[index % 3]
        random_part = [draw.random() < chance for _ in range(50)]
        burst = [True] * 6 + [False] * (2 * window + 2) + [True, False] * 4
        overflows = random_part + burst if index % 2 else burst + random_part
        if index % 7 == 0:
            overflows = [True] * 40
        found.append(
            {
                "initial_scale_power": power,
                "loss_scale_window": window,
                "hysteresis": hysteresis,
                "consecutive_hysteresis": consecutive,
                "min_loss_scale": minimum,
                "overflows": "".join("01"[overflow] for overflow in overflows),
            }
        )
    return found


def without_zero(case: dict[str, Any]) -> dict[str, Any]:
    """Of the rule of FP16_Optimizer, which wants a GPU to be made: it is called on an object with its settings."""
    from types import SimpleNamespace

    import torch
    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
    from deepspeed.runtime.fp16.loss_scaler import LossScaleConfig

    arguments = {
        "init_scale": 2 ** case["initial_scale_power"],
        "scale_window": case["loss_scale_window"],
        "min_scale": case["min_loss_scale"],
    }
    config = LossScaleConfig(torch.float16, True, 0, arguments)
    optimizer, scales = SimpleNamespace(loss_scale_config=config, verbose=False), []
    for overflow in case["overflows"]:
        FP16_Optimizer._update_scale(optimizer, overflow == "1")
        scales.append(config.cur_scale)
    return {**case, "scales": scales}


def main(target: str) -> None:
    import deepspeed
    from deepspeed.runtime.fp16 import loss_scaler

    loss_scaler.dist.get_rank = lambda: 0
    out = []
    for case in cases():
        scaler = loss_scaler.DynamicLossScaler(
            init_scale=2 ** case["initial_scale_power"],
            scale_window=case["loss_scale_window"],
            min_scale=case["min_loss_scale"],
            delayed_shift=case["hysteresis"],
            consecutive_hysteresis=case["consecutive_hysteresis"],
        )
        scales, raised = [], False
        for overflow in case["overflows"]:
            try:
                scaler.update_scale(overflow == "1")
            except Exception:
                raised = True
                break
            scales.append(scaler.cur_scale)
        out.append({**case, "scales": scales, "raised": raised})
    parts = {"cases": out, "stage0": [without_zero(case) for case in cases()[::5]]}
    lines = {key: ",\n".join(json.dumps(e, separators=(",", ":")) for e in part) for key, part in parts.items()}
    body = ",".join(f'"{key}":[\n{text}\n]' for key, text in lines.items())
    with open(target, "w") as file:
        file.write(f'{{"deepspeed":"{deepspeed.__version__}",{body}}}\n')
    print(f"{len(out)} traces in {target}, {sum(entry['raised'] for entry in out)} end at the minimum")


if __name__ == "__main__":
    main(sys.argv[1])
