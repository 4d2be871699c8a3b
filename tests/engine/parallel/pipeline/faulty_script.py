"""One stage of a pipeline goes wrong in the second batch, as ``sys.argv[1]`` says. Run as a process of its own."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from ds_hf import initialize
from tests.engine.parallel.pipeline.models import batches, pairs, pipeline

how = sys.argv[1]
torch.set_num_threads(1)
dist.init_process_group("gloo")
module = pipeline(True, 2)
settings = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "ds_hf": {"hang_timeout": 3},
}
engine, *_ = initialize(model=module, config=settings)
tokens = batches(2, 4)
engine.train_batch(pairs(tokens[0]))
calls = 0


def go_wrong(*args: object) -> None:
    global calls
    calls += 1
    if calls < 3:
        return
    if dist.get_rank() == 0:
        time.sleep(1)  # the other one has gone when this one begins to send
        return
    if how in ("kill", "kill early"):
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raise":
        raise ValueError("this layer has had enough")
    time.sleep(600)


if dist.get_rank() == 1 or how == "kill early":
    module.forward_funcs[0].register_forward_pre_hook(go_wrong)
engine.train_batch(pairs(tokens[1]))
