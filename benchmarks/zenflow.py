"""What ZenFlow learns beside plain offload: loss of a small Llama on the demo's text, over steps.

    python benchmarks/zenflow.py OUT.jsonl ["plain offload;ZenFlow" ["1,2,3"]]    # which runs, which seeds

One process on the CPU, stage 2, bf16 with fp32 master weights, 300 steps, with the batches and the model of
wire_convergence.py. The model has learnt for ``PRETRAINED`` steps by plain offload before and goes on with a tenth of
that rate, for ZenFlow is meant to fine-tune; a run "from scratch" has the rate of wire_convergence.py and a new model.
A line a run: losses of ten steps each, the loss on held-out text before and at the end.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ds_hf
from benchmarks.wire_convergence import BATCH, BETAS, LR, STEPS, batch, model, rate, text

PRETRAINED, FINE = 1500, 0.1
Run = dict[str, Any]


def zenflow(**keys: Any) -> Run:
    chosen = {"select_strategy": "step", "select_interval": 100, "update_interval": 4, "overlap_step": True}
    return {"topk_ratio": 0.1, **chosen, **keys}


RUNS: dict[str, Run | None] = {
    "plain offload": None,
    "ZenFlow": zenflow(),
    "ZenFlow, update_interval 2": zenflow(update_interval=2),
    "ZenFlow, update_interval auto": zenflow(update_interval="auto"),
    "ZenFlow, no overlap": zenflow(overlap_step=False),
    "ZenFlow, topk_ratio 0.05": zenflow(topk_ratio=0.05),
    "plain offload, from scratch": None,
    "ZenFlow, from scratch": zenflow(),
    "ZenFlow, from scratch, 60 rounds of warm-up": zenflow(full_warm_up_rounds=60),
}


def train(made: nn.Module, section: Run | None, of: Tensor, seed: int, steps: int, share: float) -> list[float]:
    """Train in place, at this share of the rate; the losses."""
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}, "zenflow": section}
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "betas": BETAS, "weight_decay": 0.0}},
        "zero_optimization": zero,
    }
    engine, optimizer, *_ = ds_hf.initialize(model=made, config=config)
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for number in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LR * share * rate(number * STEPS // steps)
        ids = batch(of, generator)
        loss = engine(ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    optimizer.settle(last=True)
    engine.destroy()
    return losses


@torch.no_grad()
def held_out_loss(made: nn.Module, of: Tensor) -> float:
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(64):
        ids = batch(of, generator)
        found.append(float(made(ids, labels=ids).loss))
    return sum(found) / len(found)


def alone(runs: list[str]) -> tuple[Path, list[str], list[int]]:
    """A benchmark that is one process: the file, runs and seeds of its command line."""
    names = sys.argv[2].split(";") if sys.argv[2:3] not in ([], [""]) else runs
    seeds = [int(seed) for seed in (sys.argv[3] if len(sys.argv) > 3 else "1,2,3").split(",")]
    for key, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}.items():
        os.environ.setdefault(key, value)
    return Path(sys.argv[1]), names, seeds


def main() -> None:
    out, names, seeds = alone(list(RUNS))
    of, other = text(held_out=False), text(held_out=True)
    for seed in seeds:
        learnt = model(seed)
        train(learnt, None, of, 100 + seed, PRETRAINED, 1.0)
        begun = {name: value.float().clone() for name, value in learnt.state_dict().items()}
        for name in names:
            made = model(seed)
            fine = "scratch" not in name
            if fine:
                made.load_state_dict(begun)
            before, began = held_out_loss(made, other), time.perf_counter()
            losses = train(made, RUNS[name], of, seed, STEPS, FINE if fine else 1.0)
            line = {"run": name, "seed": seed, "before": before, "held_out": held_out_loss(made, other)}
            print(json.dumps({**line, "seconds": round(time.perf_counter() - began, 1)}), flush=True)
            with out.open("a") as file:
                every = [round(sum(losses[first : first + 10]) / 10, 4) for first in range(0, STEPS, 10)]
                file.write(json.dumps({**line, "losses": every}) + "\n")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
