"""A tiny model under ZeRO that saves after every step and goes on where its folder's last checkpoint ends."""

from __future__ import annotations

import argparse
import os
import socket
import time
from pathlib import Path

import torch
import torch.distributed as dist

import ds_hf


class Model(torch.nn.Module):
    """Two layers; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 16)
        self.second = torch.nn.Linear(16, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (self.second(torch.tanh(self.first(inputs))).squeeze(-1) - inputs.sum(-1).sin()).square().mean()


def main() -> None:
    """Train; with --slow wait between the steps; with --fail-at R,S raise on rank R in step S of the first start."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--slow", type=float, default=0.0)
    parser.add_argument("--fail-at", default="")
    args = parser.parse_args()
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 2},
    }
    engine, *_ = ds_hf.initialize(model=Model(), config=config)
    rank = dist.get_rank()
    assert args.local_rank in (-1, int(os.environ["LOCAL_RANK"]))
    if (args.folder / "latest").exists():
        engine.load_checkpoint(str(args.folder))
    first = engine.global_steps
    print(f"start rank {rank} of {dist.get_world_size()} on {socket.gethostname()} at step {first}", flush=True)
    for step in range(first, args.steps):
        loss = engine(torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank)))
        if args.fail_at == f"{rank},{step}" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise ValueError("broken on purpose")
        engine.backward(loss)
        engine.step()
        engine.save_checkpoint(str(args.folder))
        time.sleep(args.slow)
        if rank == 0:
            print(f"step {step} loss {loss.item():.6f}", flush=True)
    print(f"end rank {rank}", flush=True)


if __name__ == "__main__":
    main()
