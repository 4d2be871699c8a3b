"""Updates that go on when the step has returned: who waits for them, and what becomes of a fault."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ds_hf.engine.builder import initialize
from ds_hf.engine.engine import Engine
from ds_hf.engine.optim.host_store import HostStore
from ds_hf.engine.optim.stepping import _UnitsJob
from ds_hf.errors import DsHfError
from tests.contract.test_parity import ADAMW, MICRO, batches, model
from tests.helpers.distributed import run_distributed

STEPS = 3


def make() -> Engine:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": MICRO,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": [0.9, 0.999]}},  # type: ignore[call-overload]
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    }
    return initialize(model=model(), config=config)[0]


def train(engine: Engine, first: int, last: int) -> list[float]:
    losses = []
    for (micro,) in batches(1, 1)[first:last]:
        loss = engine(micro[0])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def weights(engine: Engine) -> list[torch.Tensor]:
    return [p.detach().clone() for p in engine.module.parameters()]


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor], what: str) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), what


def slowly(run: Callable[..., None]) -> Callable[..., None]:
    def late(*args: Any) -> None:
        time.sleep(0.05)
        run(*args)

    return late


def masters(engine: Engine) -> list[torch.Tensor]:
    return [engine.optimizer.master(b).clone() for unit in engine.units for b in unit.buffers]  # type: ignore[union-attr]


def moments(engine: Engine) -> list[torch.Tensor]:
    return [state["exp_avg"].clone() for state in engine.optimizer.state.values()]  # type: ignore[union-attr]


def saved(engine: Engine) -> list[torch.Tensor]:
    found = engine.optimizer.state_dict()  # type: ignore[union-attr]
    return [t.clone() for t in found["masters"]]


def logits(engine: Engine) -> list[torch.Tensor]:
    return [engine(batches(1, 1)[STEPS][0][0]).detach()]


def after_the_end(engine: Engine) -> list[torch.Tensor]:
    engine.destroy()
    return weights(engine)


def readers_wait() -> None:
    HostStore.lands_later = False
    expected, losses = {}, []
    readers = (weights, masters, moments, saved, logits, after_the_end)
    for read in readers:
        engine = make()
        losses = train(engine, 0, STEPS)
        assert not engine.optimizer.store._landing
        expected[read] = read(engine)
        engine.destroy()
    HostStore.lands_later = True
    _UnitsJob._run = slowly(_UnitsJob._run)  # type: ignore[method-assign]
    for read in readers:
        engine = make()
        assert train(engine, 0, STEPS) == losses
        left = engine.optimizer.store._landing.values()
        assert sum(not landing.update.done() for landing in left) > 2, "the step waited"
        assert_equal(read(engine), expected[read], read.__name__)
        engine.destroy()


def test_the_step_returns_and_readers_wait() -> None:
    run_distributed(readers_wait, 1, timeout=90)


def one_process_waits_for_all() -> None:
    engine = make()
    train(engine, 0, STEPS)
    assert not engine.optimizer.store._landing


def test_where_processes_gather_the_step_waits() -> None:
    run_distributed(one_process_waits_for_all, 2, timeout=60)


def fault() -> None:
    engine = make()
    train(engine, 0, 1)
    engine._finish_update()
    run = _UnitsJob._run

    def fail(*args: Any) -> None:
        time.sleep(0.05)
        if threading.current_thread() is not threading.main_thread():
            raise MemoryError("of the test")

    _UnitsJob._run = fail  # type: ignore[method-assign]
    train(engine, 1, 2)
    _UnitsJob._run = run  # type: ignore[method-assign]
    with pytest.raises(MemoryError, match="of the test"):
        train(engine, 2, 3)
    with pytest.raises(DsHfError, match="the last step failed half-way"):
        engine.save_checkpoint("nowhere")
    with pytest.raises(DsHfError, match="the last step failed half-way"):
        engine.optimizer.state_dict()  # type: ignore[union-attr]


def test_a_fault_of_an_update_beside_the_forward_is_raised_and_nothing_is_saved() -> None:
    run_distributed(fault, 1, timeout=60)
