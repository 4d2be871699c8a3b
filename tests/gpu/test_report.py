"""Reports on real GPUs: sums against the wall clock and torch's profiler, what it costs, one rank that is late."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule

from ds_hf.engine.observe.probes.trial.split import covered
from ds_hf.engine.observe.report import attach
from ds_hf.profile.analysis import analyse
from ds_hf.profile.load import read_run
from ds_hf.profile.report import write_report
from tests.gpu.test_overlap import data, engine_of, step
from tests.helpers.distributed import run_distributed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

TOKENS = 8192
AWAY = ("nccl", "Memcpy", "barrier_kernel", "sum_parts")


def recorded_engine(stage: int, folder: Path | None, **more: Any) -> Any:
    attach.makes_pages = False
    section = {} if folder is None else {"ds_hf": {"report": str(folder), "report_steps": "all"}}
    return engine_of(stage, **section, **more)


def wall(engine: Any, x: Tensor, steps: int) -> float:
    """Seconds of so many steps on the clock."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(steps):
        step(engine, x)
    torch.cuda.synchronize()
    return time.perf_counter() - begun


def device_times(engine: Any, x: Tensor, steps: int) -> tuple[float, float]:
    """Seconds of so many steps in which kernels compute, and in which nothing but communication runs.

    Two steps come before them: what the profiler sees for the first time stops the host for milliseconds.
    """
    with profile(activities=[ProfilerActivity.CUDA], schedule=schedule(wait=0, warmup=1, active=1)) as profiler:
        step(engine, x)
        step(engine, x)
        torch.cuda.synchronize()
        profiler.step()
        for _ in range(steps):
            step(engine, x)
        torch.cuda.synchronize()
    kernels = [e for e in profiler.events() or () if e.device_type == DeviceType.CUDA]
    spans = [(e.time_range.start, e.time_range.end, any(part in e.name for part in AWAY)) for e in kernels]
    work = covered([(start, end) for start, end, away in spans if not away])
    both = covered([(start, end) for start, end, _ in spans])
    return work * 1e-6, (both - work) * 1e-6


def timed_and_profiled(folder: Path, stage: int) -> tuple[list[float], int, list[tuple[int, float, float]]]:
    """Seconds of eight steps, three times, from the step ``plain``; three profiles, each with its first step."""
    engine = recorded_engine(stage, folder)
    x = data(TOKENS)
    for _ in range(4):
        step(engine, x)
    plain = engine.global_steps + 1
    seconds = [wall(engine, x, 8) for _ in range(3)]
    profiles = [(engine.global_steps + 3, *device_times(engine, x, 8)) for _ in range(3)]
    engine.destroy()
    return seconds, plain, profiles


@pytest.mark.alone
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=needs_two)])
def test_sums_against_the_wall_clock_and_the_profiler(tmp_path: Path, stage: int, ranks: int) -> None:
    found = run_distributed(timed_and_profiled, ranks, tmp_path, stage, backend="nccl", timeout=180)
    run = read_run(tmp_path)
    for rank, (seconds, plain, profiles) in zip(run.ranks, found, strict=True):
        # The profiler stops the host now and then, so the clock is compared without it; after a step's end the machine
        # may, so all is compared where that happened least.
        told = [sum(rank.steps[first + n].seconds for n in range(8)) for first in range(plain, plain + 24, 8)]
        print(f"rank {rank.number}: steps {told}, clock {seconds}")
        assert min(abs(one - other) / other for one, other in zip(told, seconds, strict=True)) <= 0.03
        assert min(apart(rank, *profile) for profile in profiles) <= 0.03


def apart(rank: Any, first: int, work: float, talk: float) -> float:
    """How far the report of eight steps is from torch's profile of them, as a share of their time.

    What is left of the whole are gaps between kernels, which count as computing: where the profiler stops the host they
    are long, so that a report may have more of it than the profile, not less.
    """
    steps = [rank.steps[number] for number in range(first, first + 8)]
    whole = sum(each.seconds for each in steps)
    own: dict[str, float] = {}
    for each in steps:
        for key, part in rank.own_times(each).items():
            own[key.kind] = own.get(key.kind, 0.0) + part
    print(f"rank {rank.number}: steps {whole:.4f}, {own}; profiler: work {work:.4f}, communication alone {talk:.4f}")
    assert sum(own.values()) == pytest.approx(whole, rel=1e-3)
    exposed = own.get("gather", 0.0) + own.get("reduction", 0.0)
    computing = own.get("compute", 0.0) + own.get("update", 0.0)
    return max(abs(exposed - talk), work - computing) / whole


def cost(folder: Path, stage: int) -> tuple[float, float]:
    """Seconds of a step without and with a report, in turns; the least, as a busy host only adds to them."""
    times: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(3):
        for on in (False, True):
            engine = recorded_engine(stage, folder / str(turn) if on else None)
            x = data(TOKENS)
            for _ in range(4):
                step(engine, x)
            for _ in range(3):
                torch.cuda.synchronize()
                begun = time.perf_counter()
                for _ in range(8):
                    step(engine, x)
                torch.cuda.synchronize()
                times[on].append((time.perf_counter() - begun) / 8)
            engine.destroy()
            torch.cuda.empty_cache()
    return min(times[False]), min(times[True])


@pytest.mark.alone
@pytest.mark.parametrize("stage", [1, 3])
def test_recording_every_step_costs_a_hundredth_at_most(tmp_path: Path, stage: int) -> None:
    ((off, on),) = run_distributed(cost, 1, tmp_path, stage, backend="nccl", timeout=180)
    print(f"stage {stage}: {off * 1e3:.3f} ms without, {on * 1e3:.3f} ms with a report ({on / off - 1:+.2%})")
    assert on <= 1.01 * off


def offloaded(folder: Path) -> None:
    engine = recorded_engine(3, folder, zero_optimization={"stage": 3, "offload_optimizer": {"device": "cpu"}})
    x = data(TOKENS)
    for _ in range(6):
        step(engine, x)
    engine.destroy()


def test_offload_is_told_apart_and_the_page_is_made(tmp_path: Path) -> None:
    run_distributed(offloaded, 1, tmp_path, backend="nccl", timeout=120)
    verdict = write_report(tmp_path)
    kinds = verdict.analysis.kinds
    print("\n".join(verdict.lines()))
    assert kinds.get("update", 0.0) + kinds.get("offload", 0.0) > 0
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert (
        verdict.analysis.run.header["matrix_rate"] > 1e14 or "H" not in verdict.analysis.run.header["facts"]["device"]
    )


def late_rank(folder: Path) -> None:
    engine = recorded_engine(2, folder)
    if dist.get_rank() == 1:
        engine.module.blocks[3].register_forward_pre_hook(lambda *_: (torch.cuda.synchronize(), time.sleep(0.05))[0])
    x = data(TOKENS)
    for _ in range(6):
        step(engine, x)
    engine.destroy()


@pytest.mark.alone
@needs_two
def test_a_late_rank_is_named(tmp_path: Path) -> None:
    run_distributed(late_rank, 2, tmp_path, backend="nccl", timeout=120)
    worst = analyse(read_run(tmp_path)).late[0]
    assert (worst.rank, worst.place) == (1, "forward of blocks.3")
    assert 0.03 < worst.seconds < 0.08
