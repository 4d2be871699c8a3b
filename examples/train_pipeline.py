"""Trains the small Llama of ``train_lm.py`` as a pipeline: each process has some of its layers.

    torchrun --nproc-per-node 2 examples/train_pipeline.py --output_dir out

It saves every 40 steps; the same command with ``--resume`` goes on from the last checkpoint, also at another number of
processes. The model is written to ``out/model``, as transformers writes it.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import datasets
import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from train_lm import ModelArguments, PreTrainedTokenizerFast, make_dataset, make_model, make_tokenizer

TOKENS, EVALUATED = 128, 128  # of a sample; held-out samples


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", default="pipeline_output")
    parser.add_argument("--stages", type=int, help="default: as many as processes; others are data-parallel")
    parser.add_argument("--max_steps", type=int, default=120)
    parser.add_argument("--save_steps", type=int, default=40)
    parser.add_argument("--micro_batch", type=int, default=2, help="samples; 16 make a step")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--local_rank", type=int, help="given by the deepspeed command; not needed")
    return parser.parse_args()


def data_of(folder: Path) -> tuple[Any, Any, Any]:
    """Tokenizer, training and held-out samples; the first process makes them, the others read them."""
    datasets.disable_progress_bars()
    if dist.get_rank() == 0:
        make_tokenizer(folder / "tokenizer", ModelArguments.vocab_size // 2)
    for rank in range(dist.get_world_size()):
        if rank == dist.get_rank():
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")
            train, held_out = (make_dataset(part, tokenizer, TOKENS, folder / "cache") for part in (False, True))
        dist.barrier()
    # The loader of a pipeline gives samples in order.
    return tokenizer, train.shuffle(seed=42).with_format("torch"), held_out.with_format("torch")


def held_out_loss(engine: Any, samples: Any, size: int) -> float:
    """The mean over all of them; every process reads the same."""
    batches = [{name: samples[start : start + size][name] for name in ("input_ids", "labels")}
               for start in range(0, EVALUATED, size)]  # fmt: skip
    return float(engine.eval_batch(iter(batches), num_micro_batches=len(batches)))


def main() -> None:
    args = arguments()
    deepspeed.init_distributed()
    folder = Path(args.output_dir)
    tokenizer, train, held_out = data_of(folder)
    torch.manual_seed(42)
    model = make_model(ModelArguments(vocab_size=2048, hidden_size=128), TOKENS, tokenizer)
    stages = args.stages or dist.get_world_size()
    module = PipelineModule.from_transformers(model, num_stages=stages)
    config = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": args.micro_batch,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.0}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-3, "warmup_num_steps": 10}},
        "zero_optimization": {"stage": 1},
    }
    engine, *_ = deepspeed.initialize(model=module, config=config, training_data=train)
    print(f"stage {engine.stage_id} of {stages}: process {os.getpid()}", flush=True)
    first = dist.get_rank() == 0
    if args.resume:
        engine.load_checkpoint(str(folder / "checkpoints"))
    loss = held_out_loss(engine, held_out, args.micro_batch)
    if first:
        print(f"step {engine.global_steps:>4}   held-out loss {loss:7.4f}", flush=True)
    while engine.global_steps < args.max_steps:
        loss = float(engine.train_batch())
        step = engine.global_steps
        if first and step % 20 == 0:
            print(f"step {step:>4}   loss {loss:7.4f}", flush=True)
        if step % args.save_steps == 0 and step < args.max_steps:
            engine.save_checkpoint(str(folder / "checkpoints"))
    loss = held_out_loss(engine, held_out, args.micro_batch)
    engine.export_pretrained(str(folder / "model"))
    if first:
        tokenizer.save_pretrained(folder / "model")
        print(f"step {engine.global_steps:>4}   held-out loss {loss:7.4f}", flush=True)
    engine.destroy()


if __name__ == "__main__":
    main()
