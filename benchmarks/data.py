"""What dropped tokens and layers save of a step: one process, a Llama from scratch, random tokens.

    python benchmarks/data.py --layers 24 --width 2048 --length 2048 --micro-batch 4 --json FILE

Engines take turns over ``--rounds``: one without, one with ``random_ltd`` that keeps ``--share`` of the tokens in all
blocks but the first and the last, and one with ``progressive_layer_drop`` at its last theta. A step is forward,
backward and update in bf16 at ``--stage``; the median of a round's steps counts, and of rounds the shortest. Asked for
is a ratio of 0.78 at most, with half of the tokens, on 1.35 B (the sizes above).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ds_hf import initialize

STEPS, WARM_UP = 6, 3


def settings(args: argparse.Namespace, kind: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "train_batch_size": args.micro_batch,
        "bf16": {"enabled": args.device != "cpu"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "zero_optimization": {"stage": args.stage},
    }
    if kind == "random_ltd":
        keep = int(args.length * args.share)
        schedule = {"min_value": keep, "max_value": keep, "schedule_type": "fixed_linear"}
        schedule["schedule_config"] = {"require_steps": 1, "seq_per_step": 1}
        inner = {
            "enabled": True,
            "random_ltd_layer_id": list(range(1, args.layers - 1)),
            "random_ltd_schedule": schedule,
        }
        found["data_efficiency"] = {"enabled": True, "data_routing": {"enabled": True, "random_ltd": inner}}
    if kind == "progressive_layer_drop":
        found["progressive_layer_drop"] = {"enabled": True, "theta": args.theta, "gamma": 1e9}
    return found


def median_step(args: argparse.Namespace, kind: str) -> float:
    """Seconds of a step; the engine is built for it, and gone afterwards."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=args.width,
        intermediate_size=args.width * 11 // 4 // 64 * 64,
        num_hidden_layers=args.layers,
        num_attention_heads=max(args.width // 128, 2),
        vocab_size=args.vocabulary,
        max_position_embeddings=args.length,
        use_cache=False,
    )
    with torch.device(args.device):
        model = LlamaForCausalLM(config)
    engine, *_ = initialize(model=model.train(), config=settings(args, kind))
    tokens = torch.randint(0, args.vocabulary, (args.micro_batch, args.length), device=args.device)
    times = []
    for _ in range(WARM_UP + STEPS):
        begin = time.perf_counter()
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
        if args.device != "cpu":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    engine.destroy()
    del engine, model
    if args.device != "cpu":
        torch.cuda.empty_cache()
    return statistics.median(times[WARM_UP:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 24), ("width", 2048), ("length", 2048), ("vocabulary", 32000), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--theta", type=float, default=0.5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    kinds = ("plain", "random_ltd", "progressive_layer_drop")
    rounds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(args.rounds):
        for kind in kinds:
            rounds[kind].append(median_step(args, kind))
    best = {kind: min(times) for kind, times in rounds.items()}
    result = {kind: {"seconds": best[kind], "ratio": best[kind] / best["plain"]} for kind in kinds}
    for kind, numbers in result.items():
        print(f"{kind:<24} {numbers['seconds'] * 1e3:9.2f} ms  {numbers['ratio']:.3f}")
    if args.json is not None:
        args.json.write_text(json.dumps({"arguments": {k: str(v) for k, v in vars(args).items()}, **result}, indent=2))


if __name__ == "__main__":
    main()
