"""The report of a process against torch.profiler on the same steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from ds_hf.profile.analysis import analyse
from ds_hf.profile.load import read_run
from tests.engine.observe.report.common import make_engine
from tests.helpers.distributed import run_distributed

STEPS = 4


class Wide(nn.Module):
    """Matrices so large that what Python does between them does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(4))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden).relu()
        return hidden.square().mean()


def profiled(folder: Path) -> dict[int, float]:
    """Seconds of each step in operators of torch, without the update."""
    torch.set_num_threads(1)
    engine = make_engine(1, folder, Wide())
    inputs, total = torch.randn(1024, 1024), {}
    for step in range(1, STEPS + 1):
        with profile(activities=[ProfilerActivity.CPU]) as found:
            for _ in range(engine.batch.accumulation_steps):
                engine.backward(engine(inputs))
                with torch.profiler.record_function("update"):
                    engine.step()
        top = [event for event in found.events() if event.cpu_parent is None and event.name != "update"]
        total[step] = sum(event.cpu_time_total for event in top) / 1e6
    engine.destroy()
    return total


@pytest.mark.slow
def test_computing_is_what_torch_profiler_counts(tmp_path: Path) -> None:
    (operators,) = run_distributed(profiled, 1, tmp_path, timeout=60)
    analysis = analyse(read_run(tmp_path))
    assert len(analysis.steps) >= STEPS // 2
    wanted = sum(operators[step] for step in analysis.steps) / len(analysis.steps)
    assert analysis.kinds["compute"] == pytest.approx(wanted, rel=0.03)
    assert sum(analysis.kinds.values()) == pytest.approx(analysis.seconds, rel=0.03)
