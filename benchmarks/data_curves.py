"""What data efficiency learns: loss on held-out text over the tokens that blocks computed with.

    python benchmarks/data_curves.py OUT.jsonl ["dense;curriculum" ["1,2,3"]]    # which runs, which seeds
    python benchmarks/data_curves.py --chart                                     # docs/img/data.svg, and a table

A small Llama over bytes of the standard library's source, one process on the CPU, fp32. Every run may spend as many
*layer-tokens* as dense training does in ``STEPS`` steps: a token that one block computes with is one. So a run with
shorter sequences or fewer tokens takes more steps. The rate rises for 30 steps, and falls with what has been spent.
The loss on held-out text is that of whole sequences and all tokens, after each twentieth of the budget.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import ds_hf
from benchmarks.wire_chart import text as words
from benchmarks.wire_convergence import text
from benchmarks.zenflow import alone

STEPS, BATCH, LENGTH, LAYERS, LR, PARTS = 800, 4, 256, 6, 2e-3, 20
ROOT = Path(__file__).parents[1]
RECORDS, CHART = ROOT / "benchmarks/results/data-curves.jsonl", ROOT / "docs/img/data.svg"
Run = dict[str, Any]


def curriculum(share: float, shortest: int = 32) -> Run:
    """Sequences that grow for ``share`` of the steps that dense training takes."""
    schedule = {"total_curriculum_step": int(STEPS * share), "difficulty_step": 8}
    metric = {"min_difficulty": shortest, "max_difficulty": LENGTH, "schedule_type": "fixed_linear"}
    section = {"enabled": True, "curriculum_metrics": {"seqlen": {**metric, "schedule_config": schedule}}}
    return {"data_sampling": {"enabled": True, "curriculum_learning": section}}


def dropped(share: float, growing: float) -> Run:
    """The middle blocks compute with ``share`` of the tokens at first, with all after ``growing`` of dense steps."""
    schedule = {"require_steps": int(STEPS * growing), "seq_per_step": 8}
    ltd: Run = {
        "enabled": True,
        "total_layer_num": LAYERS,
        "random_ltd_layer_num": LAYERS - 2,
        "random_ltd_layer_id": list(range(1, LAYERS - 1)),
        "model_mask_name": "attention_mask",
        "model_type": "decoder",
        "hidden_state_order": "batch_seq_dim",
        "random_ltd_schedule": {
            "min_value": int(LENGTH * share),
            "max_value": LENGTH,
            "schedule_type": "fixed_linear",
            "schedule_config": schedule,
        },
    }
    return {"data_routing": {"enabled": True, "random_ltd": ltd}}


RUNS: dict[str, Run] = {
    "dense": {},
    "curriculum": curriculum(0.5),
    "curriculum, half as long": curriculum(0.25),
    "random_ltd": dropped(0.5, 0.8),
    "random_ltd, half as long": dropped(0.5, 0.4),
}
COLOURS = dict(zip(RUNS, ("#444444", "#1b9e77", "#a6d854", "#d95f02", "#e6ab02"), strict=True))


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=LENGTH, **sizes))


def batch(of: Tensor, generator: torch.Generator) -> Tensor:
    starts = torch.randint(0, len(of) - LENGTH, (BATCH,), generator=generator)
    return torch.stack([of[start : start + LENGTH] for start in starts.tolist()]).long()


@torch.no_grad()
def held_out_loss(made: nn.Module, of: Tensor) -> float:
    generator, found = torch.Generator().manual_seed(0), []
    made.eval()
    for _ in range(40):
        ids = batch(of, generator)
        found.append(float(made(input_ids=ids, labels=ids).loss))
    made.train()
    return sum(found) / len(found)


def train(section: Run, seed: int, of: Tensor, other: Tensor) -> dict[str, Any]:
    config: Run = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "betas": [0.9, 0.99], "weight_decay": 0.0}},
    }
    if section:
        config["data_efficiency"] = {"enabled": True, **section}
    engine, optimizer, *_ = ds_hf.initialize(model=model(seed), config=config)
    generator = torch.Generator().manual_seed(seed)
    budget, spent, steps, losses = STEPS * BATCH * LENGTH * LAYERS, 0, 0, []
    while spent < budget:
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, (steps + 1) / 30) * (1 - 0.9 * spent / budget)
        ids = batch(of, generator)
        if "data_sampling" in section:
            ids = engine.cut_to_curriculum({"input_ids": ids})["input_ids"]
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        kept = ids.shape[1]
        if "data_routing" in section:
            kept = min(engine.random_ltd_scheduler.get_current_seq(), kept)
        engine.step()
        steps += 1
        spent += ids.shape[0] * (2 * ids.shape[1] + (LAYERS - 2) * kept)
        if spent * PARTS >= budget * (len(losses) + 1):
            losses.append(round(held_out_loss(engine.module, other), 4))
    engine.destroy()
    return {"steps": steps, "losses": losses}


def chart() -> None:
    latest = {(row["run"], row["seed"]): row for row in map(json.loads, RECORDS.read_text().splitlines())}
    curves: dict[str, list[float]] = {}
    for name in RUNS:
        rows = [row["losses"] for (run, _), row in latest.items() if run == name]
        if not rows:
            continue
        curves[name] = [sum(each) / len(rows) for each in zip(*rows, strict=True)]
    left, top, width, height, low, high = 60, 40, 460, 300, 1.8, 3.0
    dense = curves["dense"]

    def place(part: int, loss: float) -> str:
        y = top + height * (high - min(max(loss, low), high)) / (high - low)
        return f"{left + width * (part + 1) / PARTS:.1f},{y:.1f}"

    lines = [words(left, 22, "Loss on held-out text over layer-tokens, mean of the seeds")]
    for loss in (1.8, 2.1, 2.4, 2.7, 3.0):
        (x, y), (end, _) = place(-1, loss).split(","), place(PARTS - 1, loss).split(",")
        lines.append(f'<line x1="{x}" y1="{y}" x2="{end}" y2="{y}" stroke="#888" stroke-opacity="0.3"/>')
        lines.append(words(left - 8, float(y) + 4, str(loss), "end"))
    for part in (0, 5, 10, 15, 20):
        x, _ = place(part - 1, low).split(",")
        lines.append(words(float(x), top + height + 18, f"{100 * part // PARTS} %", "middle"))
    for number, (name, losses) in enumerate(curves.items()):
        points = " ".join(place(part, loss) for part, loss in enumerate(losses))
        lines.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[name]}" stroke-width="2"/>')
        x, y = left + width + 16, top + 14 + 20 * number
        lines.append(f'<rect x="{x}" y="{y - 9}" width="12" height="4" fill="{COLOURS[name]}"/>')
        lines.append(words(x + 18, y - 3, name))
        reached = next((part + 1 for part, loss in enumerate(losses) if loss <= dense[-1]), None)
        share = "never" if reached is None else f"{100 * reached // PARTS} %"
        steps = [row["steps"] for (run, _), row in latest.items() if run == name]
        ratio = losses[-1] / dense[-1]
        print(
            f"{name:28} {sum(steps) / len(steps):6.0f} steps {losses[-1]:.4f} {ratio:.4f} of dense; its loss at {share}"
        )
    lines.append(words(left + width / 2, top + height + 38, "layer-tokens, of those of dense training", "middle"))
    wide, tall = left + width + 210, top + height + 60
    size = f'viewBox="0 0 {wide} {tall}" width="{wide}" height="{tall}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    style = "<style>text { font: 12px sans-serif; fill: #666 }</style>"
    CHART.write_text("\n".join([head, style, *lines, "</svg>\n"]))


def main() -> None:
    if sys.argv[1:] == ["--chart"]:
        chart()
        return
    out, names, seeds = alone(list(RUNS))
    of, other = text(held_out=False), text(held_out=True)
    for seed in seeds:
        for name in names:
            began = time.perf_counter()
            line = {"run": name, "seed": seed, **train(RUNS[name], seed, of, other)}
            print(json.dumps({**line, "seconds": round(time.perf_counter() - began, 1)}), flush=True)
            with out.open("a") as file:
                file.write(json.dumps(line) + "\n")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
