"""Running statistics of batch norm: what is told of them, and what they are beside torch's of the process's batches."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ds_hf import initialize
from ds_hf.engine.zero.gather import GatheredParameters
from ds_hf.log import forget_said
from tests.helpers.distributed import run_distributed
from tests.helpers.logs import Lines
from tests.helpers.parity import base_config


class Normed(nn.Sequential):
    """A layer and its norm, which may stay out of training."""

    def __init__(self, stays: bool = False, **options: Any) -> None:
        super().__init__(nn.Linear(4, 4), nn.BatchNorm1d(4, **options))
        self.stays = stays

    def train(self, mode: bool = True) -> Normed:
        super().train(mode)
        if self.stays:
            self[1].eval()
        return self


# Of a model as it is given to initialize(), what is done to the engine then, and whether something is told.
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any], bool]] = {
    "in training": (Normed, lambda engine: None, True),
    "put in training": (lambda: Normed().eval(), lambda engine: engine.train(), True),
    "evaluated": (Normed, lambda engine: engine.eval(), False),
    "its norms stay as they are": (lambda: Normed(stays=True), lambda engine: engine.train(), False),
    "its norms are put out of it": (Normed, lambda engine: engine.module[1].eval(), False),
    "statistics of the batch": (lambda: Normed(track_running_stats=False), lambda engine: None, False),
    "statistics that stay": (lambda: Normed(momentum=0.0), lambda engine: None, False),
}


def running_statistics(stage: int) -> dict[str, Any]:
    """What is told in two steps, and this process's means beside those of torch."""
    lines, found = Lines(logging.WARNING), {}
    logging.getLogger("ds_hf").addHandler(lines)
    for name, (build, prepare, _) in CASES.items():
        forget_said()
        lines.texts.clear()
        torch.manual_seed(0)
        model: Any = build()
        alone, error = copy.deepcopy(model[1]), 0.0
        engine, *_ = initialize(model=model, config=base_config(stage))
        prepare(engine)
        alone.train(model[1].training)
        for step in range(2):
            data = torch.randn(6, 4, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
            with GatheredParameters(list(model.parameters())):
                layer = [param.detach().cpu().clone() for param in model[0].parameters()]
            engine.backward(engine(data.to(engine.device)).square().mean())
            alone(nn.functional.linear(data, *layer))
            engine.step()
        if alone.running_mean is not None:
            error = float((model[1].running_mean.cpu() - alone.running_mean).abs().max())
        for buffer in model.buffers():  # what the text says
            dist.broadcast(buffer, 0)
        mean = model[1].running_mean
        engine.destroy()
        told = sum("running statistics" in text for text in lines.texts)
        found[name] = told, error, None if mean is None else mean.tolist()
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_running_statistics_of_each_process_are_told(stage: int) -> None:
    first, second = run_distributed(running_statistics, 2, stage, timeout=60)
    for name, (_, _, tells) in CASES.items():
        assert (name, first[name][0], second[name][0]) == (name, int(tells), 0)
        assert first[name][1] < 1e-6, name
        assert second[name][1] < 1e-6, name
        assert first[name][2] == second[name][2], name


def alone_in_training() -> int:
    lines = Lines(logging.WARNING)
    logging.getLogger("ds_hf").addHandler(lines)
    engine, *_ = initialize(model=Normed(), config=base_config(1))
    engine.backward(engine(torch.randn(6, 4).to(engine.device)).square().mean())
    engine.step()
    engine.destroy()
    return sum("running statistics" in text for text in lines.texts)


def test_one_process_has_those_of_all_batches() -> None:
    assert run_distributed(alone_in_training, 1, timeout=60) == [0]
