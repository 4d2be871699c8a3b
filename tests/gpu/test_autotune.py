"""A trial on a GPU: step times by events, peaks by the allocator, an artificial limit that it keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.observe.probes.trial.test_driver import batch_of, events_of, make_engine, requested
from tests.helpers.distributed import run_distributed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
MIB = 2**20


def trial(folder: str, limit: int | None, compiled: bool) -> list[int]:
    engine = make_engine(2, bf16={"enabled": True}, ds_hf={"compile": "blocks" if compiled else False})
    from ds_hf.engine.observe.probes.trial.driver import attach

    sizes = ((64, 2), (1024, 1), (1 << 20, 1), (1 << 21, 1))
    driver = attach(engine, requested(folder, points=sizes, survey=True, memory_limit=limit, natural_steps=3))
    for index in range(12):
        batch = {name: value.to(engine.device) for name, value in batch_of(engine, index).items()}
        engine.backward(engine(**batch)["loss"])
        engine.step()
    assert driver is not None
    return [int(driver.done), engine.global_steps]


@pytest.mark.timeout(300)  # blocks are compiled anew for each of five sizes
@pytest.mark.parametrize("compiled", [False, True])
def test_trial_with_a_limit(tmp_path: Path, compiled: bool) -> None:
    limit = 512 * MIB
    assert run_distributed(trial, 1, str(tmp_path), limit, compiled, backend="nccl", timeout=270) == [[1, 6]]
    events = events_of(tmp_path)
    points: dict[int, dict[str, Any]] = {e["micro"]: e for e in events if e["event"] == "point"}
    assert [points[m]["outcome"] for m in (64, 1024, 1 << 20, 1 << 21)] == ["ok", "ok", "oom", "oom"]
    for micro in (64, 1024):
        assert 0 < points[micro]["low"] <= points[micro]["seconds"] <= points[micro]["high"] < 1
        assert 0 < points[micro]["peak"] <= limit
        assert 0 < points[micro]["optimizer_seconds"] < points[micro]["seconds"]
    facts = next(e for e in events if e["event"] == "facts")
    assert facts["cuda"]
    assert facts["memory"] == limit
    shares = next(e for e in events if e["event"] == "split")
    assert shares["compute"] > 0
    assert abs(shares["compute"] + shares["communication"] + shares["idle"] - 1) < 1e-6
