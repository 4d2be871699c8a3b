"""What an engine prints of its phases: times and memory of each, and the operations of one forward."""

from __future__ import annotations

import io
import re
import time
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_hf import Engine, initialize
from ds_hf.engine.observe.breakdown import Breakdown
from tests.helpers.distributed import run_distributed
from tests.helpers.parity import base_config

NAP = 0.03  # seconds
KEYS = ["fwd", "bwd", "bwd_inner", "bwd_allreduce", "step"]


class Sleeper(nn.Module):
    """Takes its time forwards, and fails when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4, bias=False)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(NAP)
        if self.fails:
            raise RuntimeError("told to")
        out: Tensor = self.linear(x)
        return out


def make(stage: int = 2, **more: Any) -> Engine:
    config = base_config(stage, gradient_accumulation_steps=2, **more)
    engine: Engine = initialize(model=Sleeper(), config=config)[0]
    return engine


def train(engine: Engine, micro_batches: int) -> str:
    """What is printed meanwhile."""
    with redirect_stdout(io.StringIO()) as printed:
        for _ in range(micro_batches):
            engine.backward(engine(torch.ones(2, 8)).mean())
            engine.step()
    return printed.getvalue()


def times(printed: str) -> list[dict[str, float]]:
    lines = [line for line in printed.splitlines() if line.startswith("time (ms) | ")]
    return [{key: float(value) for key, value in re.findall(r"(\w+): ([\d.]+)", line)} for line in lines]


def wall_clock() -> None:
    engine = make(wall_clock_breakdown=True)
    engine.monitor = SimpleNamespace(enabled=True, write_events=(written := []).extend)  # type: ignore[assignment]
    for step in (1, 2):
        found = times(train(engine, 2))
        if engine.axis.rank:
            assert not found, "rank 0 speaks"
            continue
        first, second, whole = found
        assert list(first) == list(second) == [f"{key}_microstep" for key in KEYS]
        assert list(whole) == KEYS
        for key in KEYS:
            apart = abs(whole[key] - first[f"{key}_microstep"] - second[f"{key}_microstep"])
            assert apart < max(5, 0.4 * whole[key])  # other work may come between two clocks
        for found in (first, second, whole):
            parts = [found[key] for key in found if key.startswith(("bwd_inner", "bwd_allreduce"))]
            assert all(part > 0 for part in parts)
            assert sum(parts) <= next(found[key] for key in found if key in ("bwd", "bwd_microstep")) + 0.02
        assert first["fwd_microstep"] >= NAP * 1e3 <= second["fwd_microstep"]
        kept = engine.get_wall_clock_timers()
        assert {key: round(value, 2) for key, value in kept.items()} == second | whole
        events = [event for event in written if "elapsed" in event[0]][-5:]
        assert [event[0] for event in events] == [
            f"Train/Samples/elapsed_time_ms_{name}"
            for name in ("forward", "backward", "backward_inner", "backward_allreduce", "step")
        ]
        assert [event[1] for event in events] == [kept[key] for key in KEYS]
        assert {event[2] for event in events} == {step * engine.train_batch_size()}
    engine.destroy()


@pytest.mark.parametrize("world", [1, 2])
def test_times_of_micro_batches_add_up_to_those_of_a_step(world: int) -> None:
    run_distributed(wall_clock, world, timeout=60)


def not_timed() -> None:
    """Evaluation; and a forward that failed leaves nothing running."""
    engine = make(wall_clock_breakdown=True)
    engine.eval()
    with torch.no_grad():
        for _ in range(5):
            engine(torch.ones(2, 8))
    engine.train()
    began = time.perf_counter()
    engine.module.fails = True
    with pytest.raises(RuntimeError, match="told to"):
        engine(torch.ones(2, 8))
    engine.module.fails = False
    first, *_ = times(train(engine, 2))
    wall = (time.perf_counter() - began) * 1e3
    assert 2 * NAP * 1e3 <= first["fwd_microstep"] <= wall, "the one that failed and the one after it"


def test_evaluation_is_not_timed() -> None:
    run_distributed(not_timed, 1, timeout=60)


def memory() -> None:
    printed = train(make(memory_breakdown=True), 2)
    assert [line.partition(":")[0] for line in printed.splitlines()] == [
        f"{when} {name}" for _ in range(2) for name in ("forward", "backward", "step") for when in ("before", "after")
    ]
    assert printed.count("max_mem_allocated") == 12
    assert not times(printed)


def test_memory_of_each_phase() -> None:
    run_distributed(memory, 1, timeout=60)


def operations(folder: str) -> None:
    """2 x 8 by 8 x 4, once: 2 operations for each of 64 products."""
    path = Path(folder) / "deep" / "profile.txt"
    for stage in (2, 3):
        for own, where in (
            ({"output_file": str(path)}, "file"),
            ({"output_file": "", "detailed": False, "top_modules": 1}, "terminal"),
        ):
            engine = make(stage, flops_profiler={"enabled": True, "profile_step": 1, **own})
            assert "flops profile" not in train(engine, 2)
            assert not path.exists()
            printed = train(engine, 2)
            assert len(times(printed)) == 3, "it switches the times on"
            text = path.read_text() if where == "file" else printed
            assert ("flops profile" in printed) == (where == "terminal")
            assert re.search(r"fwd flops per GPU: +128\b", text), text
            assert re.search(r"fwd MACs per GPU: +64\b", text), text
            assert re.search(r"params per GPU: +32\b", text), text
            for line in ("bwd latency", "step latency", "iter latency", "samples/second", "batch size per GPU"):
                assert re.search(rf"^  {line}: +[\d.]+", text, re.MULTILINE), text
            assert "depth 1:\n    params      - Linear: 32 \n    MACs        - Linear: 64 MACs\n" in text, text
            assert ("linear: 128 flops (Linear, 32 = 100.00% Params, 64 MACs = 100.00% MACs" in text) == (
                where == "file"
            ), text
            assert "flops profile" not in train(engine, 2), "once"
            path.unlink(missing_ok=True)
            engine.destroy()


def test_operations_of_one_forward(tmp_path: Path) -> None:
    run_distributed(operations, 1, str(tmp_path), timeout=60)


def unasked() -> None:
    engine = make()
    assert not engine.events.watched
    assert train(engine, 2) == ""
    assert not engine.timers.get_timers()
    assert engine.get_wall_clock_timers() == {}
    assert [type(each) for each in make(wall_clock_breakdown=True).events.observers] == [Breakdown]


def test_who_does_not_ask_is_told_nothing() -> None:
    run_distributed(unasked, 1, timeout=60)
