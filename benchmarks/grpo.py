"""A GRPO loop with TRL on several processes, by one script: ds_hf against the real DeepSpeed, in seconds a step.

    python benchmarks/grpo.py --deepspeed-path FOLDER --json FILE        # FOLDER: pip install --target FOLDER deepspeed
    python benchmarks/grpo.py --engines ds_hf --stages 3 --steps 3       # a check without DeepSpeed

Each engine trains the same model with ``trl.GRPOTrainer`` (ZeRO, bf16 on GPUs) in processes of its own, in turns. A
step is a batch of prompts, ``--new`` tokens for each of two completions a prompt, their rewards, and one optimizer
step; the first is not counted. The end-of-sequence token is never said, so every completion has all of its tokens.
Losses and rewards are printed: engines that compute alike have the same.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
SHAPES = {"small": (256, 4, 4), "350m": (1024, 24, 16), "1b3": (2048, 24, 16)}  # width, blocks, heads
WORDS = 509


def save_model(folder: Path, shape: str) -> None:
    """A Llama with random weights and a tokenizer of words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    width, blocks, heads = SHAPES[shape]
    words = ["<pad>", "<eos>", "<unk>", *(f"w{index}" for index in range(WORDS))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    fast.save_pretrained(folder)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        pad_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def reward(completions: list[str], **_: Any) -> list[float]:
    """How many different words."""
    return [float(len(set(completion.split()))) for completion in completions]


def train(args: argparse.Namespace) -> None:
    """One rank of one engine: what a user would write."""
    import datasets
    import deepspeed
    import torch
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.ends.append(time.perf_counter())

    cuda = torch.cuda.is_available()
    zero = {"stage": args.stage}
    config: dict[str, Any] = {
        "zero_optimization": zero,
        "bf16": {"enabled": cuda},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
    }
    settings = GRPOConfig(
        output_dir=str(Path(args.model_folder) / "out"),
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=args.new,
        max_steps=args.steps,
        learning_rate=1e-4,
        beta=0.0,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        gradient_checkpointing=False,
        bf16=cuda,
        use_cpu=not cuda,
        seed=3,
        generation_kwargs={"suppress_tokens": [0, 1]},
        deepspeed=config,
    )
    rows = [{"prompt": " ".join(f"w{(7 * row + index) % WORDS}" for index in range(8 + row % 5))} for row in range(64)]
    clock = Clock()
    trainer = GRPOTrainer(
        model=args.model_folder,
        args=settings,
        train_dataset=datasets.Dataset.from_list(rows),
        reward_funcs=reward,
        callbacks=[clock],
    )
    trainer.train()
    if trainer.accelerator.process_index == 0:
        seconds = [end - begin for begin, end in zip(clock.ends, clock.ends[1:], strict=False)]
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
        told = {"seconds": seconds, "losses": losses, "rewards": rewards, "version": deepspeed.__version__}
        Path(args.result).write_text(json.dumps(told))
    torch.distributed.barrier()
    os._exit(0)  # how gloo's threads end is not measured here


def run(engine: str, stage: int, model: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Train by one engine; what its rank 0 told."""
    root = HERE.parents[1]
    first = args.deepspeed_path if engine == "deepspeed" else f"{root}{os.pathsep}{root / 'ds_hf' / 'compat'}"
    result = model / f"{engine}.json"
    result.unlink(missing_ok=True)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{first}{os.pathsep}{os.environ.get('EXTRA_PYTHONPATH', '')}",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if engine == "deepspeed":  # it compiles with the ninja that came with it
        environment["PATH"] = f"{args.deepspeed_path}/bin{os.pathsep}{environment['PATH']}"
        environment |= {"DS_ACCELERATOR": "cpu"} if args.cpu else {}
    command = [sys.executable, str(HERE), "--worker", "--stage", str(stage), "--steps", str(args.steps)]
    command += ["--new", str(args.new), "--model-folder", str(model), "--result", str(result)]
    ranks = [
        subprocess.Popen(
            command,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(args.processes),
                 "LOCAL_WORLD_SIZE": str(args.processes)},
            stdout=subprocess.DEVNULL,
            stderr=(model / f"{engine}.{rank}.log").open("w"),
        )
        for rank in range(args.processes)
    ]  # fmt: skip
    try:
        ends = time.monotonic() + args.timeout
        while time.monotonic() < ends and any(rank.poll() is None for rank in ranks):
            if any(rank.poll() for rank in ranks):  # the others would wait for it
                break
            time.sleep(0.2)
        codes = [rank.poll() != 0 for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(codes) or not result.exists():
        logs = "\n".join((model / f"{engine}.{rank}.log").read_text()[-2000:] for rank in range(args.processes))
        raise SystemExit(f"{engine} at stage {stage} failed:\n{logs}")
    told: dict[str, Any] = json.loads(result.read_text())
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="ds_hf,deepspeed")
    parser.add_argument("--deepspeed-path", default="")
    parser.add_argument("--model", choices=SHAPES, default="small")
    parser.add_argument("--stages", default="3")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--new", type=int, default=64, help="tokens of a completion")
    parser.add_argument("--rounds", type=int, default=2, help="times that each engine trains, in turns")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one engine")
    parser.add_argument("--json", default="")
    for name in ("--stage", "--model-folder", "--result"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        args.stage = int(args.stage)
        train(args)
        return
    import torch

    args.cpu = not torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), args.model)
        for stage in map(int, args.stages.split(",")):
            found: dict[str, list[dict[str, Any]]] = {}
            for _ in range(args.rounds):
                for engine in args.engines.split(","):
                    found.setdefault(engine, []).append(run(engine, stage, Path(folder), args))
            for engine, rounds in found.items():
                row = {
                    "engine": engine,
                    "version": rounds[0]["version"],
                    "stage": stage,
                    "model": args.model,
                    "processes": args.processes,
                    "new": args.new,
                    "device": "cpu" if args.cpu else torch.cuda.get_device_name(),
                    "seconds_a_step": round(statistics.median(s for each in rounds for s in each["seconds"]), 3),
                    "fastest": round(min(s for each in rounds for s in each["seconds"]), 3),
                    "losses": rounds[0]["losses"],
                    "rewards": rounds[0]["rewards"],
                }
                print(json.dumps(row), flush=True)
                if args.json:
                    with open(args.json, "a") as file:
                        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
