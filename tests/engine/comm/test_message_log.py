"""The log of messages: one for each engine, known to the watch as long as the engine lives."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ds_hf import initialize
from ds_hf.engine.comm.message_log import MessageLog
from tests.engine.parallel.pipeline.models import batches, pairs, pipeline
from tests.helpers.distributed import run_distributed


def test_who_is_waited_for() -> None:
    log = MessageLog((0, 1, 2), 1, "pipe", "0/world")
    assert log.others(1) == []
    with log.awaiting(2):
        assert (log.others(1), log.inside) == ([2], True)
    assert (log.others(1), log.inside) == ([], False)
    with pytest.raises(RuntimeError, match="closed"), log.awaiting(0):
        raise RuntimeError("closed")
    assert log.peer is None
    log("send", "activations", torch.zeros(3))
    assert (log.count, list(log.entries)) == (1, [("send", "activations", 3, "")])
    assert MessageLog((0, 1), 1, "pipe", "0/world").key != log.key


def two_engines() -> list[tuple[int, int]]:
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "ds_hf": {"hang_timeout": 30},
    }
    first, second = (initialize(model=pipeline(tied, 2), config=settings)[0] for tied in (True, False))
    watch = first.mesh.world.log.watch
    found = []
    for engine in (first, second):
        engine.train_batch(pairs(batches(1, 4)[0]))
        messages = [log for log in watch.logs if not log.compared]
        found.append((len(messages), len({log.key for log in messages})))
        engine.destroy()
    dist.barrier()
    return [*found, (len([log for log in watch.logs if not log.compared]), 0)]


def test_engines_have_their_own_and_take_it_along() -> None:
    assert run_distributed(two_engines, 2) == [[(2, 2), (1, 1), (0, 0)]] * 2
