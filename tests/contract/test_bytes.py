"""Bytes that parameters, gradients and optimizer states hold on each rank: exactly the formula of the stage.

The formula is the ZeRO paper's, over the elements of the flat layouts (the model's own plus alignment padding, which a
test bounds). What is measured are storages: those the engine knows, and all that the garbage collector can reach.
"""

from __future__ import annotations

import gc
import time
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from ds_hf import Engine, initialize
from ds_hf.engine.zero.layout import ALIGNMENT
from tests.helpers.distributed import run_distributed
from tests.helpers.models import TinyLM, token_batches
from tests.helpers.parity import base_config


class Bytes(NamedTuple):
    """Bytes of one rank between a backward and its step."""

    parameters: int
    gradients: int
    optimizer: int
    reachable: int
    at_rest: int  # reachable after the step


def storages(tensors: list[Tensor]) -> int:
    """Bytes of the distinct storages behind ``tensors``."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def reachable() -> int:
    """Bytes of every tensor storage that Python can reach: the least of some looks, as gloo's threads let go late."""
    gc.collect()
    looks = []
    for _ in range(6):
        looks.append(storages([t for t in gc.get_objects() if type(t) in (Tensor, torch.nn.Parameter)]))
        time.sleep(0.03)
    return min(looks)


def model() -> TinyLM:
    torch.manual_seed(1)
    return TinyLM(vocab=64, width=48, depth=4)


def measure(stage: int, dtype: str) -> Bytes:
    more: dict[str, Any] = {dtype: {"enabled": True}} if dtype != "fp32" else {}
    outside = reachable()
    engine, *_ = initialize(model=model(), config=base_config(stage, gradient_accumulation_steps=2, **more))
    outside += storages(list(engine.module.buffers()))
    batch = token_batches(2, 4, vocab=64)
    for index in range(3):
        engine.backward(engine(batch))
        if index < 2:
            engine.step()
    moments = states_nbytes(engine)
    buffers = [b for unit in engine.units for b in unit.buffers]
    result = Bytes(
        parameters=sum(b.nbytes for b in buffers),
        gradients=sum(g.nbytes for g in engine.reducer.buffers),
        optimizer=moments,
        reachable=reachable() - outside - storages([batch]),
        at_rest=0,
    )
    engine.step()
    engine.backward(engine(batch))
    engine.step()
    result = result._replace(at_rest=reachable() - outside - storages([batch]))
    engine.destroy()
    return result


def states_nbytes(engine: Engine) -> int:
    assert engine.optimizer is not None
    return engine.optimizer.nbytes


def numel_of(world: int) -> tuple[int, int]:
    """Elements of the flat layouts, and of the model."""
    total = exact = 0
    shapes = model()
    units = [list(block.parameters()) for block in shapes.blocks]
    inside = {id(p) for unit in units for p in unit}
    units.append([p for p in shapes.parameters() if id(p) not in inside])
    for unit in units:
        end = 0
        for param in unit:
            end = -(-end // ALIGNMENT) * ALIGNMENT + param.numel()
            exact += param.numel()
        total += -(-end // (ALIGNMENT * world)) * ALIGNMENT * world
    return total, exact


def expected(stage: int, dtype: str, world: int) -> Bytes:
    """The ZeRO paper's table; fp32 needs no separate master."""
    numel, _ = numel_of(world)
    width = 4 if dtype == "fp32" else 2
    master = 0 if dtype == "fp32" else 4
    share = numel // world
    parameters = width * (share if stage == 3 else numel)
    # one micro-batch of two is in: partial sums are whole, sharded ones are not; both still of the model's dtype
    gradients = width * (share if stage >= 2 else numel)
    optimizer = (8 + master) * (share if stage >= 1 else numel)
    return Bytes(parameters, gradients, optimizer, parameters + gradients + optimizer, parameters + optimizer)


def all_stages(dtype: str) -> list[Bytes]:
    gc.freeze()  # what was imported before: it makes the walks slow
    return [measure(stage, dtype) for stage in range(4)]


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_bytes_are_the_formula(dtype: str, world: int) -> None:
    total, exact = numel_of(world)
    padding = 8 * (total - exact)
    for rank, measured in enumerate(run_distributed(all_stages, world, dtype, timeout=100)):
        for stage, found in enumerate(measured):
            wanted = expected(stage, dtype, world)
            assert found[:2] == wanted[:2], (rank, stage)
            # moments end with the last parameter, not with the padding; all ranks have moments but for that
            assert wanted.optimizer - padding <= found.optimizer <= wanted.optimizer, (rank, stage)
            # the step counters of Adam, the placeholders' and the norm's few bytes are not model states
            reachable = found.parameters + found.gradients + found.optimizer
            assert reachable <= found.reachable <= reachable + 1024, (rank, stage)
            assert wanted.at_rest - padding <= found.at_rest <= wanted.at_rest + 1024, (rank, stage)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_padding_is_small(world: int) -> None:
    """Fewer than ALIGNMENT elements a parameter, and ALIGNMENT x world a unit."""
    total, exact = numel_of(world)
    assert exact == sum(p.numel() for p in model().parameters())
    assert 0 <= total - exact < 5 * ALIGNMENT * (world + 4)


def destroyed(stage: int) -> int:
    """Bytes reachable after destroy(), beyond the model's."""
    trained = model()
    before = reachable()
    for _ in range(2):
        engine, *_ = initialize(model=trained, config=base_config(stage, bf16={"enabled": True}))
        batch = token_batches(2, 4, vocab=64)
        engine.backward(engine(batch))
        engine.step()
        engine.backward(engine(batch))
        engine.destroy()
        del engine, batch, _
    return reachable() - before


def destroyed_at_all_stages() -> list[int]:
    gc.freeze()
    return [destroyed(stage) for stage in range(4)]


@pytest.mark.parametrize("world", [1, 2])
def test_destroy_gives_back_all_but_the_weights(world: int) -> None:
    """What stays is the model in bf16, half of what it was, or less where it stays sharded."""
    _, exact = numel_of(world)
    for left in run_distributed(destroyed_at_all_stages, world, timeout=60):
        assert max(left) < 0, left
        assert left[0] == pytest.approx(-2 * exact, rel=0.05)
