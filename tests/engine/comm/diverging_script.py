"""A training script whose rank 1 goes astray, in the way that the command line says."""

import sys
import time

import torch
import torch.distributed as dist

import ds_hf

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3},
    "ds_hf": {"hang_timeout": 4.0},
}


def main(how: str) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    engine, *_ = ds_hf.initialize(model=model, config=CONFIG)
    astray = dist.get_rank() == 1
    batches = 5 if how == "return" and astray else 8
    for index in range(batches):
        if index == 5 and astray and how == "raise":
            raise ValueError("the data of rank 1 are bad")
        if index == 5 and astray and how == "evaluate":
            with torch.no_grad():
                engine(torch.ones(2, 8))
        engine.backward(engine(torch.ones(2, 8, device=engine.device)).square().mean())
        engine.step()
    if how == "early":  # rank 0 ends after a rest, and the other has still something to do by itself
        time.sleep(6.0 if astray else 2.5)


if __name__ == "__main__":
    main(sys.argv[1])
