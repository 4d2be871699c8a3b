"""What is put off runs beside the steps that follow, and its errors end training."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from ds_hf.engine.optim.zenflow import store
from ds_hf.errors import DsHfError
from tests.contract.test_zenflow import EVERY, engine_of, plain, steps, weights
from tests.helpers.distributed import run_distributed

SECTION = {**EVERY, "select_interval": 50, "update_interval": 3, "overlap_step": True}


def steps_beside_an_update(dtype: str | None = None) -> None:
    """A step ends, and two more, while the update that it began is held up; then all is as if it was not."""
    held, begun, update = threading.Event(), threading.Event(), store._update

    def hold(*args: Any) -> None:
        begun.set()
        assert held.wait(300)
        update(*args)

    own = {} if dtype is None else {dtype: {"enabled": True}}
    engine = engine_of(SECTION, 2, **own)
    store._update = hold  # type: ignore[assignment]
    try:
        losses = steps(engine, last=4)
        assert begun.wait(300)
        first = next(engine.module.parameters())
        before = first.detach().clone()
        losses += steps(engine, first=4, last=6)
        moved = (first.detach() != before).float().mean().item()
        assert 0 < moved <= 0.25, "chosen columns alone"
    finally:
        held.set()
        store._update = update
    losses += steps(engine, first=6)
    found = weights(engine)
    engine.destroy()
    if dtype is None:
        world = torch.distributed.get_world_size()
        expected = plain(SECTION, 1, world, 0.0, device=str(engine.device))
        assert losses == pytest.approx(expected[0], rel=1e-5)
        assert all((found[name] - value).norm() / value.norm() < 1e-3 for name, value in expected[1].items())


@pytest.mark.parametrize("world", [1, 2])
def test_steps_go_on_beside_an_update(world: int) -> None:
    run_distributed(steps_beside_an_update, world, timeout=60)


def failing_updates(folder: str) -> None:
    update = store._update

    def fail(*args: Any) -> None:
        raise ArithmeticError("no update")

    engine = engine_of(SECTION, 2)
    steps(engine, last=2)
    engine.save_checkpoint(folder)
    steps(engine, first=2, last=4)
    store._update = fail  # type: ignore[assignment]
    with pytest.raises(ArithmeticError, match="no update"):
        steps(engine, first=4)
    with pytest.raises(DsHfError):
        engine.save_checkpoint(folder)
    store._update = update
    engine.load_checkpoint(folder)
    steps(engine, first=2)
    engine.destroy()


def test_an_update_that_fails_ends_training(tmp_path: Any) -> None:
    run_distributed(failing_updates, 1, str(tmp_path), timeout=60)
