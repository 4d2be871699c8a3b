"""Updates that go on when the step has returned: who waits for them, and what becomes of a fault."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ds_hf import Engine, initialize
from ds_hf.engine.optim import offloading
from ds_hf.engine.optim.host_store import HostStore
from ds_hf.engine.optim.stepping import UnitsJob
from ds_hf.errors import DsHfError
from tests.contract.test_parity import ADAMW, MICRO, batches, model
from tests.helpers.distributed import run_distributed
from tests.helpers.parity import full_weights

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
    HostStore.defers = False
    expected, losses = {}, []
    readers = (weights, masters, moments, saved, logits, after_the_end)
    for read in readers:
        engine = make()
        losses = train(engine, 0, STEPS)
        assert not engine.optimizer.store._pending
        expected[read] = read(engine)
        engine.destroy()
    HostStore.defers = True
    UnitsJob._run = slowly(UnitsJob._run)  # type: ignore[method-assign]
    for read in readers:
        engine = make()
        assert train(engine, 0, STEPS) == losses
        left = engine.optimizer.store._pending.values()
        assert sum(not pending.update.done() for pending in left) > 2, "the step waited"
        assert_equal(read(engine), expected[read], read.__name__)
        engine.destroy()


def test_the_step_returns_and_readers_wait() -> None:
    run_distributed(readers_wait, 1, timeout=90)


def one_process_waits_for_all() -> None:
    engine = make()
    train(engine, 0, STEPS)
    assert not engine.optimizer.store._pending


def test_where_processes_gather_the_step_waits() -> None:
    run_distributed(one_process_waits_for_all, 2, timeout=60)


def fault() -> None:
    engine = make()
    train(engine, 0, 1)
    engine._finish_update()
    run, began = UnitsJob._run, threading.Event()

    def fail(*args: Any) -> None:
        if threading.current_thread() is not threading.main_thread():  # there nothing is updated
            began.set()
            time.sleep(0.05)
            raise MemoryError("of the test")

    UnitsJob._run = fail  # type: ignore[method-assign]
    train(engine, 1, 2)
    assert began.wait(300)
    UnitsJob._run = run  # type: ignore[method-assign]
    with pytest.raises(MemoryError, match="of the test"):
        train(engine, 2, 3)
    with pytest.raises(DsHfError, match="the last step failed halfway"):
        engine.save_checkpoint("nowhere")
    with pytest.raises(DsHfError, match="the last step failed halfway"):
        engine.optimizer.state_dict()  # type: ignore[union-attr]


def test_a_fault_of_an_update_beside_the_forward_is_raised_and_nothing_is_saved() -> None:
    run_distributed(fault, 1, timeout=60)


# -- steps that are not made ------------------------------------------------------------------------------------------


def not_made(stage: int) -> None:
    """A gradient that is nan, of one rank: as if the step had not been asked for, wherever a unit is updated."""
    offloading.room_for_streams = lambda device: 1 << 30  # as on a GPU
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    to_host = {"offload_optimizer": {"device": "cpu"}}
    cases: list[tuple[dict[str, Any], dict[str, Any], bool]] = [
        *((to_host, {"stream": share}, at_once) for share in (0.0, 0.5, 1.0) for at_once in (True, False)),
        ({"offload_optimizer": {"device": "cpu", "ratio": 0.5}}, {}, False),
    ]
    if stage == 3:
        cases += [(way | {"offload_param": {"device": "cpu"}}, {}, True) for way in ({}, to_host)]
    for zero, own, at_once in cases:
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": MICRO,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": [0.9, 0.999]}},  # type: ignore[call-overload]
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 50, "warmup_max_lr": 1e-2}},
            "zero_optimization": {"stage": stage, **zero},
            "ds_hf": {"offload": own, "join_blocks": False},
        }
        found = []
        for bad in (False, True):
            engine, *_ = initialize(model=model(), config=config)
            if isinstance(engine.optimizer.store, HostStore):
                engine.optimizer.store.outputs._at_once = at_once  # False: as on a GPU
            losses = []
            for step, (micro,) in enumerate(batches(1, world)[:4]):
                batch = micro[rank].to(engine.device)
                loss = engine(batch)
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
                if bad and step in (0, 2):  # before there are moments that went up, and after
                    again = engine(batch)
                    engine.backward(again * float("nan") if rank == 0 else again)
                    engine.step()
            assert engine.skipped_steps == (2 if bad else 0)
            found.append((losses, engine.get_lr(), list(full_weights(engine.module).values())))
            engine.destroy()
        assert found[0][:2] == found[1][:2], (zero, own)
        assert_equal(found[1][2], found[0][2], str((zero, own)))


@pytest.mark.parametrize(
    ("world", "stage"), [(1, 3), (2, 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 2), (2, 3)))]
)
def test_a_step_that_is_not_made_changes_nothing(world: int, stage: int) -> None:
    run_distributed(not_made, world, stage, timeout=120)


# -- units without a gradient -----------------------------------------------------------------------------------------


class Sparing(nn.Module):
    """Calls only the blocks that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16)) for _ in range(4))
        self.called: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.called:
            x = x + self.blocks[index](x)
        return x


def without_gradients() -> None:
    """From the first step on, and after steps that were made or not: such a unit keeps its parameters."""
    found = []
    for zero, at_once in (({}, True), ({"offload_optimizer": {"device": "cpu"}}, False)):
        torch.manual_seed(1)
        trained = Sparing()
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": 2, **zero},
            "ds_hf": {"join_blocks": False},
        }
        engine, *_ = initialize(model=trained, config=config)
        if zero:
            engine.optimizer.store.outputs._at_once = at_once  # as on a GPU
        for called, factor in (([0, 2, 3], 1.0), ([0, 1, 2, 3], 1.0), ([0, 1, 2, 3], float("nan")), ([0, 3], 1.0)):
            trained.called = called
            engine.backward(engine(torch.ones(2, 16, dtype=torch.bfloat16)).float().mean() * factor)
            engine.step()
        engine._finish_update()
        found.append(weights(engine))
        engine.destroy()
    assert_equal(found[1], found[0], "the parameters of a unit without a gradient were written")


def test_a_unit_without_a_gradient_keeps_its_parameters() -> None:
    run_distributed(without_gradients, 1, timeout=60)
