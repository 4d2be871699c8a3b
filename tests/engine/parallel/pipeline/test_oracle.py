"""Weights after some steps, to the bit those of torch.distributed.pipelining's schedules over the same layers."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from ds_hf import initialize
from tests.engine.parallel.pipeline.models import batches, cross_entropy, pairs, pipeline
from tests.helpers.distributed import run_distributed

MICRO, LR = 4, 0.5
CONFIG = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": MICRO, "gradient_clipping": 0.0}


def of_torch(layers: list[nn.Module], chunks: int, rank: int, steps: list[Tensor]) -> dict[str, Any]:
    """Losses and weights of the last stage and of all its chunks, trained by torch alone."""
    each = len(layers) // chunks
    parts = [nn.Sequential(*layers[chunk * each : (chunk + 1) * each]) for chunk in range(chunks)]
    device = torch.device("cpu")
    stages = [PipelineStage(part, chunk * 2 + rank, 2 * chunks, device) for chunk, part in enumerate(parts)]
    schedule: Any = Schedule1F1B(stages[0], MICRO, loss_fn=cross_entropy)
    if chunks > 1:
        schedule = ScheduleInterleaved1F1B(stages, MICRO, loss_fn=cross_entropy)
    optimizer = torch.optim.SGD([param for part in parts for param in part.parameters()], lr=LR)
    found = []
    for tokens in steps:
        ids, losses = tokens[:, 0].flatten(0, 1), []
        given = (ids,) if rank == 0 else ()
        schedule.step(*given, **({"target": ids, "losses": losses} if rank == 1 else {}))
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(torch.stack(losses).detach().mean()) if losses else None)
    return {"losses": found, "weights": [param.detach() for part in parts for param in part.parameters()]}


def both(chunks: int) -> dict[str, Any]:
    module = pipeline(False, 2, depth=6, chunks=chunks)
    rank, steps = module.stage_id, batches(3, MICRO)
    layers = copy.deepcopy(module.forward_funcs)
    engine, *_ = initialize(model=module, optimizer=lambda params: torch.optim.SGD(params, lr=LR), config=CONFIG)
    losses = [float(engine.train_batch(pairs(tokens))) for tokens in steps]
    weights = [param.detach().clone() for layer in module.forward_funcs for param in layer.parameters()]
    engine.destroy()
    return {"ours": {"losses": losses, "weights": weights}, "torch": of_torch(layers, chunks, rank, steps)}


def both_schedules() -> list[dict[str, Any]]:
    return [both(1), both(2)]


def test_weights_are_those_of_torchs_schedules_to_the_bit() -> None:
    for rank, found in enumerate(run_distributed(both_schedules, 2, timeout=90)):
        for one in found:
            ours, theirs = one["ours"], one["torch"]
            assert len(ours["weights"]) == len(theirs["weights"]) > 4
            assert all(torch.equal(*pair) for pair in zip(ours["weights"], theirs["weights"], strict=True))
            assert theirs["losses"] == (ours["losses"] if rank else [None] * 3)
