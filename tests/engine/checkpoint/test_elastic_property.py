"""Any checkpoint loads at any world size, stage and offload, bit for bit: random models, optimizers and layouts.

Ranks are threads here (``simulated``); ``test_processes`` repeats a few cases with gloo processes, where random state
and data loaders are each rank's own.
"""

from __future__ import annotations

import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from tests.engine.checkpoint.random_models import (
    PRECISIONS,
    Cell,
    RandomModel,
    Shape,
    build_engine,
    cells,
    shapes,
    snapshot,
    train_steps,
)
from tests.engine.checkpoint.simulated import run_threads
from tests.engine.checkpoint.workload import differences

STEPS = 3
SMOOTH = ("AdamW", "Lamb", "Adagrad", "SGD momentum", "SGD", "NAdam")  # rounding of a gradient stays small


def save(shape: Shape, cell: Cell, model: RandomModel, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the states were when they were saved, and two steps later."""
    engine = build_engine(shape, cell, model)
    try:
        train_steps(engine, STEPS)
        engine.save_checkpoint(folder, client_state={"note": [1, "two"]})
        found = snapshot(engine)
        train_steps(engine, 2, STEPS)
        return found, snapshot(engine)
    finally:
        engine.destroy()


def load(shape: Shape, cell: Cell, model: RandomModel, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same for an engine that began elsewhere and has trained before it loads."""
    engine = build_engine(shape, cell, model)
    try:
        train_steps(engine, 1, 40)
        path, client_state = engine.load_checkpoint(folder)
        assert path is not None
        assert client_state == {"note": [1, "two"]}
        found = snapshot(engine)
        train_steps(engine, 2, STEPS)
        return found, snapshot(engine)
    finally:
        engine.destroy()


def run(function: Any, shape: Shape, cell: Cell, seed: int, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """``function`` on every rank; rank 0's result, after it was found to be every rank's."""
    models = [RandomModel(shape, seed) for _ in range(cell.world_size)]
    results = run_threads([partial(function, shape, cell, model, folder) for model in models])
    for rank, other in enumerate(results):
        found = differences(results[0][0], other[0])
        assert found == [], (rank, found)
    return results[0]  # type: ignore[no-any-return]


def close(left: dict[str, Any], right: dict[str, Any], tolerance: float) -> list[str]:
    """Names of masters that are further apart than rounding in another order explains."""
    return [
        key
        for key, value in left.items()
        if key.endswith("/master")  # parameters of 16 bits may round to the next number
        and not torch.allclose(value.double(), right[key].double(), rtol=tolerance, atol=tolerance)
    ]


def check(shape: Shape, source: Cell, targets: list[Cell], seed: int) -> None:
    folder = Path(tempfile.mkdtemp(prefix="elastic_"))
    try:
        saved, after = run(save, shape, source, seed, folder)
        assert saved["counters"][0] == STEPS
        assert differences(saved, after) != []
        for target in targets:
            loaded, later = run(load, shape, target, seed + 1, folder)
            different = differences(saved, loaded)
            if target != source:  # each rank counts the calls that round its own pieces
                different = [key for key in different if key != "roundings of each rank"]
            assert different == [], (target, different)
            if target == source:
                found = differences(after, later)
                assert found == [], (target, found)
            elif source.precision == "fp32" and shape.optimizer in SMOOTH:  # sums over other numbers of ranks round
                found = close(after, later, 1e-3)
                assert found == [], (target, found)
    finally:
        shutil.rmtree(folder)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Shape, Cell, list[Cell]]:
    cell = cells(draw(st.sampled_from(PRECISIONS)))
    source = draw(cell)
    return draw(shapes()), source, [source, *draw(st.lists(cell, min_size=1, max_size=2))]


QUICK = settings(
    max_examples=12, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


@QUICK
@given(cases())
def test_saved_at_one_layout_loads_at_any_other(case: tuple[Shape, Cell, list[Cell]]) -> None:
    shape, source, targets = case
    event(shape.optimizer)
    check(shape, source, targets, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(QUICK, max_examples=400)
@given(cases())
def test_saved_at_one_layout_loads_at_any_other_at_length(case: tuple[Shape, Cell, list[Cell]]) -> None:
    shape, source, targets = case
    check(shape, source, targets, seed=1)
