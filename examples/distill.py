"""Distills a Llama of 12 layers into one of 6, on the Python source code that `train_lm.py` reads.

The teacher is trained first, unless `--teacher` names a folder that has one. The student begins as every second layer
of it and learns its distribution over the next token, its hidden states and the text; a second student with the same
start learns the text alone. One process, or several:

    python examples/distill.py --output out
    torchrun --nproc-per-node 2 examples/distill.py --output out --stage 3 --teacher-bits 8
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from train_lm import make_dataset, make_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

import ds_hf
from ds_hf.distillation import distill, spread, teacher_engine


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--output", type=Path, default=Path("distilled"))
    add("--teacher", type=Path, help="folder of a trained teacher")
    add("--teacher-layers", type=int, default=12)
    add("--student-layers", type=int, default=6)
    add("--hidden-size", type=int, default=128)
    add("--vocab-size", type=int, default=2048)
    add("--block-size", type=int, default=128)
    add("--batch-size", type=int, default=8, help="of one process")
    add("--teacher-steps", type=int, default=1200)
    add("--student-steps", type=int, default=150)
    add("--learning-rate", type=float, default=2e-3)
    add("--temperature", type=float, default=2.0)
    add("--stage", type=int, default=2, help="ZeRO stage of what trains")
    add("--teacher-bits", type=int, choices=[4, 8], help="the teacher's weights rest in so many bits (stage 3)")
    return parser.parse_args()


def engine_of(model: Any, args: argparse.Namespace) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": args.batch_size,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": args.learning_rate}},
        "zero_optimization": {"stage": args.stage},
    }
    return ds_hf.initialize(model=model, config=config)[0]


def batches(data: Any, size: int, rank: int, world: int, device: torch.device) -> Iterator[torch.Tensor]:
    """This process's batches, over and over."""
    while True:
        for start in range(0, len(data) - size * world + 1, size * world):
            first = start + rank * size
            yield torch.tensor(data[first : first + size]["input_ids"], device=device)


def train(name: str, model: Any, steps: int, data: Any, args: argparse.Namespace) -> Any:
    engine = engine_of(model, args)
    rank, world = dist.get_rank(), dist.get_world_size()
    begun = time.perf_counter()
    engine.train()
    for step, tokens in zip(
        range(1, steps + 1), batches(data, args.batch_size, rank, world, engine.device), strict=False
    ):
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        if rank == 0 and step % max(1, steps // 4) == 0:
            took = (time.perf_counter() - begun) / step
            print(f"{name}: step {step}/{steps}   loss {loss.item():.4f}   {took:.2f} s/step", flush=True)
    return engine


@torch.no_grad()
def held_out_loss(model: Any, data: Any, args: argparse.Namespace) -> float:
    """Of each token of the held-out text; every process computes it."""
    model.eval()
    device = model.device
    losses = []
    for start in range(0, len(data), args.batch_size):
        tokens = torch.tensor(data[start : start + args.batch_size]["input_ids"], device=device)
        losses.append(model(input_ids=tokens, labels=tokens).loss.item())
    return sum(losses) / len(losses)


def student_of(teacher: LlamaForCausalLM, layers: int) -> LlamaForCausalLM:
    """Fewer layers, which begin as some of the teacher's."""
    config = copy.deepcopy(teacher.config)
    config.num_hidden_layers = layers
    student = LlamaForCausalLM(config)
    kept = {of: by for by, of in spread(layers, teacher.config.num_hidden_layers).items()}
    state = {}
    for name, value in teacher.state_dict().items():
        parts = name.split(".")
        if parts[:2] == ["model", "layers"]:
            if int(parts[2]) not in kept:
                continue
            parts[2] = str(kept[int(parts[2])])
        state[".".join(parts)] = value
    student.load_state_dict(state)
    return student


def main() -> None:
    args = arguments()
    ds_hf.init_distributed()
    set_seed(0)
    rank = dist.get_rank()
    if rank == 0:  # the others read what it made
        make_tokenizer(args.output / "tokenizer", args.vocab_size)
    dist.barrier()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.output / "tokenizer")
    for turn in (True, False):
        if turn == (rank == 0):
            text = make_dataset(False, tokenizer, args.block_size, args.output / "cache").shuffle(seed=0)
            held_out = make_dataset(True, tokenizer, args.block_size, args.output / "cache")
        dist.barrier()
    held_out = held_out.select(range(min(64, len(held_out))))

    folder = args.teacher or args.output / "teacher"
    if not (folder / "config.json").exists():
        sizes = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=args.hidden_size,
            intermediate_size=2 * args.hidden_size,
            num_hidden_layers=args.teacher_layers,
            num_attention_heads=4,
            max_position_embeddings=4 * args.block_size,
        )
        engine = train("teacher", LlamaForCausalLM(sizes), args.teacher_steps, text, args)
        engine.export_pretrained(folder)
        engine.destroy()
    teacher = LlamaForCausalLM.from_pretrained(folder)
    start = student_of(teacher, args.student_layers)

    stage = 3 if args.teacher_bits else 0
    frozen = teacher_engine(teacher, stage=stage, bits=args.teacher_bits, dtype="fp32")
    losses = {f"teacher, {teacher.config.num_hidden_layers} layers": held_out_loss(frozen, held_out, args)}
    for name, aim in (("distilled", frozen), ("by the text alone", None)):
        student = copy.deepcopy(start)
        if aim is not None:
            recipe = distill(student, aim, logits=1.0, labels=0.5, hidden=0.1, temperature=args.temperature)
        engine = train(f"student, {name}", student, args.student_steps, text, args)
        losses[f"student, {args.student_layers} layers, {name}"] = held_out_loss(engine, held_out, args)
        engine.export_pretrained(args.output / ("student" if aim is not None else "student-alone"))
        engine.destroy()
        if aim is not None:
            recipe.remove()
    if rank == 0:
        print()
        for name, loss in losses.items():
            print(f"{name:<45} held-out loss {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
