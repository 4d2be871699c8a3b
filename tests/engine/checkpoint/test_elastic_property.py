"""Any checkpoint loads at any world size, stage and offload, bit for bit: random models, optimizers and layouts.

Ranks are threads here (``simulated``); a few cases are repeated with gloo processes, where random states and positions
in the data are each rank's own.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

import ds_hf
from tests.engine.checkpoint.random_models import (
    PRECISIONS,
    Cell,
    RandomModel,
    Shape,
    Value,
    build_engine,
    cells,
    engine_config,
    shapes,
    snapshot,
    train_steps,
)
from tests.engine.checkpoint.simulated import run_threads
from tests.engine.checkpoint.workload import differences
from tests.helpers.distributed import run_distributed

STEPS = 3
DOUBLE = Shape(  # found at length: offloaded, moments of fp64 parameters were fp32
    parts=((Value((1, 1), True, 0, torch.float32),), (Value((), True, 0, torch.float64),)),
    tied=False,
    buffers=0,
    optimizer="AdamW",
)
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


def test_moments_of_fp64_parameters_stay_fp64() -> None:
    check(DOUBLE, Cell(1, 1, True, "fp32"), [Cell(1, 1, True, "fp32"), Cell(2, 0, False, "fp32")], seed=1)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(QUICK, max_examples=80, derandomize=False)  # others each time
@given(cases())
def test_saved_at_one_layout_loads_at_any_other_at_length(case: tuple[Shape, Cell, list[Cell]]) -> None:
    shape, source, targets = case
    check(shape, source, targets, seed=1)


# -- processes ------------------------------------------------------------------------------------------------------


def _batches(engine: Any, loader: Iterator[Any], count: int) -> list[list[int]]:
    """Samples of the next batches, with a step on each."""
    seen = []
    for batch in islice(loader, count):
        seen.append(sorted(batch.long().tolist()))
        engine.backward(engine(batch.mean()))
        engine.step()
    return seen


def _engine_with_data(shape: Shape, cell: Cell, seed: int, micro: int) -> Any:
    model = RandomModel(shape, seed)
    groups = [{"params": [param for param in model.parameters() if param.requires_grad]}]
    content = {**engine_config(shape, cell), "train_micro_batch_size_per_gpu": micro}
    data = torch.arange(48.0)
    return ds_hf.initialize(model=model, config=content, model_parameters=groups, training_data=data)[0]


def _save_in_processes(shape: Shape, cell: Cell, folder: Path) -> dict[str, Any]:
    engine = _engine_with_data(shape, cell, 1, 24 // 3 // cell.world_size)
    torch.manual_seed(100 + engine.axis.rank)
    loader = iter(engine.training_dataloader)
    seen = _batches(engine, loader, 3)
    engine.save_checkpoint(folder)
    found, draw = snapshot(engine), torch.rand(3).tolist()
    return {"states": found, "seen": seen, "draw": draw, "next": _batches(engine, loader, 2)}


def _load_in_processes(shape: Shape, cell: Cell, folder: Path) -> dict[str, Any]:
    engine = _engine_with_data(shape, cell, 2, 24 // 3 // cell.world_size)
    assert engine.load_checkpoint(folder)[0] is not None
    found, draw = snapshot(engine), torch.rand(3).tolist()
    return {"states": found, "draw": draw, "next": _batches(engine, iter(engine.training_dataloader), 3)}


PROCESSES = Shape(
    (
        (
            Value((33, 17), True, 0, torch.float32),
            Value((), True, 0, torch.float32),
            Value((5,), False, 0, torch.float32),
        ),
        (Value((7, 9), True, 0, torch.bfloat16), Value((3,), True, 0, torch.float32)),
    ),
    tied=True,
    buffers=2,
    optimizer="AdamW",
)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (Cell(4, 3, False, "bf16"), Cell(8, 2, False, "bf16")),
        (Cell(8, 2, True, "fp16"), Cell(4, 1, False, "fp16")),
        (Cell(8, 1, False, "bf16 masters"), Cell(2, 3, True, "bf16 masters")),
        (Cell(4, 0, False, "fp32"), Cell(4, 3, False, "fp32")),
        (Cell(8, 3, False, "bf16"), Cell(8, 3, False, "bf16")),
    ],
)
def test_processes(tmp_path: Path, source: Cell, target: Cell) -> None:
    saved = run_distributed(_save_in_processes, source.world_size, PROCESSES, source, tmp_path, timeout=120)
    loaded = run_distributed(_load_in_processes, target.world_size, PROCESSES, target, tmp_path, timeout=120)
    found = differences(saved[0]["states"], loaded[0]["states"])
    assert [key for key in found if key != "roundings of each rank"] == []
    if source.world_size == target.world_size:
        assert [rank["draw"] for rank in saved] == [rank["draw"] for rank in loaded]
        assert len({tuple(rank["draw"]) for rank in loaded}) == target.world_size
        assert [rank["next"] for rank in saved] == [rank["next"][:2] for rank in loaded]
    seen = [sample for rank in saved for batch in rank["seen"] for sample in batch]
    rest = [sample for rank in loaded for batch in rank["next"] for sample in batch]
    assert sorted(seen + rest) == list(range(48)), "every sample of the epoch once"
