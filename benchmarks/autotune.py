"""How good the autotuner's result is, and what finding it costs.

    python benchmarks/autotune.py --cpu --json autotune_cpu.json
    python benchmarks/autotune.py --model 1b --json autotune_1b.json [--deepspeed /path/to/its/venv/bin/python]

Both tune a Llama of random weights that a Trainer trains with HF's "auto" ZeRO-3 file (every bucket "auto"), at one
global batch. "exhaustive" launches every setting of the same space with every micro-batch. The table has tokens/s of

- ``own``: the file as it is, with ds_hf;
- ``deepspeed``: the file as it is, with real DeepSpeed from another interpreter (``--deepspeed``), same script;
- ``tuned``: what the search found, measured by starting its command as a user would;
- ``exhaustive``: the best of all launches, when ``--exhaustive`` is given.

and the wall time of each search, which is also its device time: a launch holds every device. ``--cpu`` uses two gloo
processes, a tiny model and an artificial memory limit.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SHAPES = {  # hidden, layers, heads, vocabulary, sequence
    "tiny": (128, 4, 4, 2048, 64),
    "1b": (2048, 24, 16, 32000, 2048),
    "7b": (4096, 32, 32, 32000, 2048),
}
SCRIPT = """
import sys, time
import torch
from dataclasses import dataclass
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

@dataclass
class Shape:
    shape: str = ""

class Timer(TrainerCallback):
    times = []
    def on_step_end(self, args, state, control, **kwargs):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())

class Tokens(torch.utils.data.Dataset):
    def __init__(self, vocabulary, length):
        self.tokens = torch.randint(vocabulary, (4096, length), generator=torch.Generator().manual_seed(0))
    def __len__(self):
        return 100_000
    def __getitem__(self, index):
        row = self.tokens[index % 4096]
        return {"input_ids": row, "labels": row}

own, arguments = HfArgumentParser((Shape, TrainingArguments)).parse_args_into_dataclasses()
hidden, layers, heads, vocabulary, length = map(int, own.shape.split(","))
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, vocab_size=vocabulary,
    intermediate_size=hidden * 11 // 4 // 64 * 64, max_position_embeddings=length, use_cache=False))
trainer = Trainer(model, arguments, train_dataset=Tokens(vocabulary, length), callbacks=[Timer()])
trainer.train()
steps = sorted(b - a for a, b in zip(Timer.times[2:], Timer.times[3:]))
per_step = arguments.train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size * length
if arguments.process_index == 0:
    print(f"tokens/s: {per_step / steps[len(steps) // 2]:.2f}", flush=True)
"""
AUTO = {
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto", "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 3, "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": "auto",
                          "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"},
}  # fmt: skip


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="the tiny model on two gloo processes")
    parser.add_argument("--model", choices=sorted(SHAPES), default="1b")
    parser.add_argument("--processes", type=int, help="default: one a GPU, or two")
    parser.add_argument("--micro", type=int, help="micro-batch of the user's file")
    parser.add_argument("--accumulation", type=int, help="accumulation steps of the user's file")
    parser.add_argument("--budget", default="10m")
    parser.add_argument("--memory-limit", help="default: that of the device, or 120MiB with --cpu")
    parser.add_argument("--exhaustive", action="store_true", help="also launch everything; long")
    parser.add_argument("--deepspeed", help="python of an environment with real DeepSpeed")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    if args.cpu:
        args.model, args.memory_limit = "tiny", args.memory_limit or "120MiB"
    args.micro = args.micro or {"tiny": 2, "1b": 4, "7b": 1}[args.model]
    args.accumulation = args.accumulation or {"tiny": 8, "1b": 1, "7b": 8}[args.model]
    return args


def words_of(args: argparse.Namespace, folder: Path) -> list[str]:
    """The training command."""
    shape = ",".join(map(str, SHAPES[args.model]))
    common = ["--output_dir", str(folder / "out"), "--max_steps", "14", "--report_to", "none", "--save_strategy", "no",
              "--disable_tqdm", "True", "--logging_strategy", "no", "--shape", shape]  # fmt: skip
    batch = ["--per_device_train_batch_size", str(args.micro), "--gradient_accumulation_steps", str(args.accumulation)]
    precision = [] if args.cpu else ["--bf16", "True"]
    return [str(folder / "train.py"), *common, *batch, *precision, "--deepspeed", str(folder / "ds_config.json")]


def tokens_per_second(words: list[str], python: str, processes: int, environment: dict[str, str]) -> float:
    """Run a training and read what it prints."""
    run = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", *words]
    found = subprocess.run(run, capture_output=True, text=True, env=environment, timeout=1800, check=False)
    match = re.search(r"tokens/s: ([\d.]+)", found.stdout)
    if match is None:
        raise SystemExit(f"{' '.join(run)} failed:\n{found.stdout[-2000:]}\n{found.stderr[-4000:]}")
    return float(match[1])


def search(args: argparse.Namespace, folder: Path, processes: int, **changes: Any) -> dict[str, Any]:
    """One search, and the training with its result."""
    from rich.console import Console

    from ds_hf.autotune.options import Options, nbytes_of, seconds_of
    from ds_hf.autotune.run import tune

    limit = nbytes_of(args.memory_limit) if args.memory_limit else None
    options = Options(results_dir=folder, budget=seconds_of(args.budget), tune=("all",), memory_limit=limit,
                      processes=processes)  # fmt: skip
    start = time.monotonic()
    result = tune(words_of(args, folder.parent), dataclasses.replace(options, **changes), Console())
    seconds = time.monotonic() - start
    point = result.best[1]
    words = result.words[3:] if result.words[0] == "torchrun" else result.words
    return {
        "seconds": seconds,
        "in_engine": SHAPES[args.model][4] * processes * point.micro * point.accumulation / point.seconds,
        "setting": result.best[0].setting,
        "micro": result.best[1].micro,
        "kept": result.kept,
        "words": words,
        "launches": len(list((folder / "trials").iterdir())),
    }  # fmt: skip


def main() -> None:
    args = parse()
    import torch

    processes = args.processes or (torch.cuda.device_count() if torch.cuda.is_available() and not args.cpu else 2)
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    os.environ.update(environment)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        (folder / "ds_config.json").write_text(json.dumps(AUTO))
        words = words_of(args, folder)
        figures: dict[str, Any] = {"model": args.model, "processes": processes, "torch": torch.__version__,
                                   "global_batch": args.micro * args.accumulation * processes}  # fmt: skip
        figures["own"] = tokens_per_second(words, sys.executable, processes, environment)
        if args.deepspeed:
            plain = {k: v for k, v in environment.items() if k != "PYTHONPATH"}
            figures["deepspeed"] = tokens_per_second(words, args.deepspeed, processes, plain)
        figures["search"] = search(args, folder / "search", processes)
        figures["tuned"] = tokens_per_second(figures["search"].pop("words"), sys.executable, processes, environment)
        if args.exhaustive:
            whole = search(args, folder / "all", processes, budget=1e9, trials=10_000, patience=10_000, micros=100,
                           sampler="exhaustive", confirm=False)  # fmt: skip
            figures["exhaustive"] = tokens_per_second(whole.pop("words"), sys.executable, processes, environment)
            figures["exhaustive_search"] = whole
    show(figures)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


def show(figures: dict[str, Any]) -> None:
    """A table of tokens/s, and ratios."""
    print(f"\n{figures['model']} on {figures['processes']} processes, global batch {figures['global_batch']}")
    for name in ("own", "deepspeed", "tuned", "exhaustive"):
        if name in figures:
            print(f"  {name:<12} {figures[name]:>14,.0f} tokens/s   tuned is {figures['tuned'] / figures[name]:.2f} x")
    print(f"  search: {figures['search']['seconds']:.0f} s, {figures['search']['launches']} launches")
    if "exhaustive_search" in figures:
        share = figures["search"]["seconds"] / figures["exhaustive_search"]["seconds"]
        print(f"  exhaustive: {figures['exhaustive_search']['seconds']:.0f} s; the search took {share:.0%} of that")


if __name__ == "__main__":
    main()
