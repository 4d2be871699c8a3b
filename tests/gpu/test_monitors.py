"""Monitors on a GPU: the host waits for nothing, and the rows are the losses all the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engine.observe.monitor.common import LOSS, LR, rows
from tests.gpu.test_overlap import data, engine_of, step
from tests.helpers.distributed import run_distributed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

STEPS = 8


def write(folder: Path, stage: int) -> list[float]:
    monitor = {"enabled": True, "output_path": str(folder), "job_name": "run"}
    engine = engine_of(stage, width=256, csv_monitor=monitor)
    batches = [data(64, 256, seed) for seed in range(STEPS)]
    losses = [step(engine, x) for x in batches[:4]]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        losses += [step(engine, x) for x in batches[4:]]
        engine.monitor.write_events([("own", losses[-1], engine.global_samples)])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(rows(folder / "run" / LOSS)) == STEPS - 1
    engine.destroy()
    assert (folder / "run" / "own.csv").is_file()
    return [loss.float().item() for loss in losses]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_rows_are_the_losses_and_nothing_is_waited_for(stage: int, tmp_path: Path) -> None:
    (losses,) = run_distributed(write, 1, tmp_path, stage, timeout=120, backend="nccl")
    assert rows(tmp_path / "run" / LOSS) == list(zip(range(1, STEPS + 1), losses, strict=True))
    assert len({rate for _, rate in rows(tmp_path / "run" / LR)}) == STEPS
