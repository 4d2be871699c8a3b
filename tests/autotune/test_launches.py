"""Settings in processes that are there: which, what happens when that fails, and that nothing is left behind."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from ds_hf.autotune.launches import Launches
from ds_hf.autotune.result import Result
from ds_hf.autotune.space import can_follow
from ds_hf.autotune.trial import Launch, LaunchOutcome, Point, Runner
from ds_hf.measure.protocol import TRIAL_ENV, TrialRequest, further_file
from tests.autotune.world import MIB, World

Search = Callable[..., Result]
ALL = {"sampler": "exhaustive", "micros": 100, "trials": 10_000, "patience": 10_000, "confirm": False}
# a script that measures as an engine would, without one
SCRIPT = """
import json, os, sys, time
from pathlib import Path
from types import SimpleNamespace
first = Path(os.environ["DS_HF_TRIAL"])
print("started", flush=True)
for number in range(100):
    path = first if number == 0 else first.parent / f"further-{number}.json"
    while not path.exists():
        time.sleep(0.01)
    request = json.loads(path.read_text())
    if request["steps"] == 13:
        sys.exit("RuntimeError: made to fail")
    point = {"event": "point", "outcome": "ok", "micro": 1, "accumulation": 1, "low": 1, "high": 1, "peak": 1,
             "optimizer_seconds": 0, "steps": 4, "seconds": os.getpid()}
    with open(request["events"], "a") as events:
        for each in ({"event": "facts", "data": 1}, point, {"event": "done", "stays": bool(request["further"])}):
            events.write(json.dumps(each) + "\\n")
    if not request["further"]:
        break
"""


def test_processes_start_once_for_what_the_engine_alone_reads(search: Search) -> None:
    world = World(memory=100_000 * MIB)
    result = search(world, **ALL)
    assert len(world.launched) == 24
    assert world.starts == 1  # the user's file, beside which all others are measured
    assert result.best[1].samples / result.best[1].seconds == pytest.approx(max(world.grid().values()))


@pytest.mark.parametrize("factor", ["train_micro_batch_size_per_gpu", "gradient_accumulation_steps"])
def test_a_factor_that_is_kept_is_kept_in_the_launch_of_the_users_file(search: Search, factor: str) -> None:
    world = World(memory=100_000 * MIB)
    result = search(world, fix=(factor,), confirm=False)
    assert result.best[1].micro == world.micro


class Trips(World):
    """Where a setting goes on in processes that are there, it ends as ``trips`` says."""

    trips = "crash"

    def run(self, launch: Launch, watch: Any) -> LaunchOutcome:
        if launch.goes_on:
            self.again.append({})
            return LaunchOutcome(self.trips, "what was there before", seconds=1.0)
        return super().run(launch, watch)


@pytest.mark.parametrize(("kind", "tried"), [("crash", 1), ("timeout", 1), ("oom", 23)])
def test_what_fails_there_is_started_by_itself(search: Search, kind: str, tried: int) -> None:
    """After a crash nothing goes on any more; memory may have been held by what was there, or be too small."""
    world = Trips(memory=100_000 * MIB)
    world.trips = kind
    result = search(world, **ALL)
    assert len(world.again) == tried
    assert world.starts == len(world.launched) == 24
    assert result.best[1].samples / result.best[1].seconds == pytest.approx(max(world.grid().values()))


class Misjudged(World):
    """Takes more memory at stage 1 than anything says that was seen before."""

    def nbytes(self, stage: int, checkpointing: bool, micro: int, compiled: bool = False) -> int:
        return self.memory + 1 if stage == 1 else super().nbytes(stage, checkpointing, micro, compiled)


def test_processes_in_which_nothing_fitted_measure_what_comes_next(search: Search) -> None:
    world = Misjudged(memory=100_000 * MIB)
    search(world, **ALL)
    assert [each["stage"] for each in world.launched].count(1) == 12  # each of six once more, by itself
    assert world.starts == 1 + 6


def test_what_ends_with_the_budget_is_not_started_again(search: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    world = Trips(memory=100_000 * MIB)
    world.trips = "timeout"
    run = world.run

    def spends(launch: Launch, watch: Any) -> LaunchOutcome:
        if launch.goes_on:
            monkeypatch.setattr(Launches, "left", property(lambda self: 0.0))
        return run(launch, watch)

    world.run = spends  # type: ignore[method-assign]
    search(world, **ALL)
    assert len(world.again) == 1
    assert world.starts == len(world.launched) < 5


@pytest.mark.parametrize(
    ("there", "other", "follows", "back"),
    [
        ({"zero_optimization.stage": 0}, {"zero_optimization.stage": 2}, True, True),
        ({"zero_optimization.stage": 3}, {"zero_optimization.stage": 2}, True, True),
        ({"zero_optimization.stage": 3, "ds_hf.compile": False}, {"zero_optimization.stage": 3}, True, True),
        ({"ds_hf.compile": "blocks", "gradient_checkpointing": True}, {"ds_hf.fp8": True}, True, True),
        ({"zero_optimization.offload_optimizer.device": "cpu"}, {"ds_hf.compile": "blocks"}, False, False),
        (
            {"tensor_parallel.autotp_size": 2},
            {"tensor_parallel.autotp_size": 2, "ds_hf.compile": "blocks"},
            True,
            True,
        ),
        ({"tensor_parallel.autotp_size": 1}, {"tensor_parallel.autotp_size": 2}, False, False),  # other batches
        ({"expert_parallel.autoep_size": 2}, {"expert_parallel.autoep_size": 2, "ds_hf.fp8": True}, True, True),
        ({"expert_parallel.autoep_size": 0}, {"expert_parallel.autoep_size": 1}, True, True),
        ({"expert_parallel.autoep_size": 1}, {"expert_parallel.autoep_size": 2}, True, False),
        ({"expert_parallel.autoep_size": 0}, {"expert_parallel.autoep_size": 2}, True, False),
        ({"expert_parallel.autoep_size": 4}, {"expert_parallel.autoep_size": 2}, False, False),
        ({"communication_data_type": "bf16"}, {"communication_data_type": None}, False, False),
    ],
)
def test_which_settings_can_follow_each_other(
    there: dict[str, Any], other: dict[str, Any], follows: bool, back: bool
) -> None:
    assert (can_follow(there, other), can_follow(other, there)) == (follows, back)


def launch(folder: Path, name: str, *, goes_on: bool, further: int = 1, steps: int = 4) -> Launch:
    (folder / "script.py").write_text(SCRIPT)
    request = TrialRequest(str(folder / name / "events.jsonl"), further=further, steps=steps)
    return Launch([sys.executable, str(folder / "script.py")], folder / name, request, 300, 300, goes_on)


def process_of(outcome: LaunchOutcome) -> int:
    (point,) = outcome.points
    return int(point.seconds)


def test_a_runner_keeps_processes_and_ends_them(tmp_path: Path) -> None:
    runner = Runner()
    try:
        first = runner(launch(tmp_path, "0", goes_on=False))
        second = runner(launch(tmp_path, "1", goes_on=True))
        third = runner(launch(tmp_path, "2", goes_on=True))
        assert [each.kind for each in (first, second, third)] == ["ok"] * 3
        assert process_of(first) == process_of(second) == process_of(third)
        assert psutil.pid_exists(process_of(first))
        assert (tmp_path / "0" / "pid").exists()
        other = runner(launch(tmp_path, "3", goes_on=False))
        assert process_of(other) != process_of(first)
        assert is_gone(process_of(first))
        assert not (tmp_path / "0" / "pid").exists()
        last = runner(launch(tmp_path, "4", goes_on=True, further=0))
        assert process_of(last) == process_of(other)
        assert is_gone(process_of(other))
        alone = runner(launch(tmp_path, "5", goes_on=True))  # there are none that could
        assert alone.kind == "ok"
        failed = runner(launch(tmp_path, "6", goes_on=True, steps=13))
        assert (failed.kind, failed.points) == ("crash", [])
        assert "made to fail" in failed.reason
        assert is_gone(process_of(alone))
        again = runner(launch(tmp_path, "7", goes_on=True))
    finally:
        runner.close()
    assert is_gone(process_of(again))
    assert not list(tmp_path.glob("*/pid"))


def test_what_an_older_search_asked_is_not_asked_again(tmp_path: Path) -> None:
    runner = Runner()
    try:
        (tmp_path / "0").mkdir()
        stale = dataclasses.replace(launch(tmp_path, "old", goes_on=False).request, steps=13)
        (tmp_path / "0" / "further-1.json").write_text(json.dumps(dataclasses.asdict(stale)))
        assert runner(launch(tmp_path, "0", goes_on=False)).kind == "ok"
        assert runner(launch(tmp_path, "1", goes_on=True)).kind == "ok"
    finally:
        runner.close()


def test_what_a_further_request_started_is_ended_too(tmp_path: Path) -> None:
    """Its environment names that request."""
    runner, mark = Runner(), str(further_file(tmp_path.resolve() / "0" / "request.json", 1))
    words = [sys.executable, "-c", "import time; time.sleep(600)"]
    with subprocess.Popen(words, env={**os.environ, TRIAL_ENV: mark}, start_new_session=True) as helper:
        try:
            assert runner(launch(tmp_path, "0", goes_on=False)).kind == "ok"
            runner.close()
            assert is_gone(helper.pid)
        finally:
            runner.close()
            helper.kill()


def is_gone(pid: int) -> bool:
    end = time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.parametrize(
    ("cuda", "shares", "seconds"),
    [
        (False, (None, None), 1.0),
        (True, (0.0, 0.0), 1.25),  # its own steps slowed the GPU's clock down
        (True, (0.0, 0.5), 1.0),
        (True, (0.5, 0.0), 1.0),
        (True, (None, 0.0), 1.0),
    ],
)
def test_probes_of_a_gpu_that_nobody_else_uses_say_nothing_of_the_machine(
    cuda: bool, shares: tuple[float | None, float | None], seconds: float
) -> None:
    problem: Any = SimpleNamespace(options=None, command=None, config=SimpleNamespace(resolved={}))
    launches = Launches(problem, lambda launch, watch: LaunchOutcome("ok"))
    levels = {"compute": (1.0, 0.0), "copy": (1.0, 0.0), "host": (1.0, 0.0)}
    load, others = ({"gpu": share} for share in shares)
    split = {"compute": 1.0, "communication": 0.0, "idle": 0.0}
    launches.refer({"facts": {"cuda": cuda}, "load": load, "machine": {"levels": levels}, "split": split})
    slower = {"compute": (1.25, 0.0), "copy": (1.25, 0.0), "host": (1.0, 0.0)}
    outcome = LaunchOutcome("ok", events={"load": others, "machine": {"levels": slower}})
    outcome.points = [Point(1, 1, 1.25, 1.24, 1.26, 0)]
    (found,) = launches._compare(outcome).points
    assert found.seconds == pytest.approx(seconds)
    assert found.slowdown == pytest.approx(1.25 / seconds)
    assert found.high / found.low < 1.07 or seconds == 1.0


@pytest.mark.parametrize(("processes", "seconds"), [(2, 0.1), (4, 0.05)])
def test_a_slow_collective_says_nothing_where_nobody_else_uses_the_gpus(processes: int, seconds: float) -> None:
    """A small one takes what the processes' launches are apart; between hosts it may be others that slow it."""
    launches = Launches(SimpleNamespace(options=None, command=None, config=SimpleNamespace(resolved={})), None)  # type: ignore[arg-type]
    levels = {"compute": [0.004, 0.01], "communication": [0.001, 0.01]}
    events = {"facts": {"cuda": True, "processes": processes, "on_host": 2}, "load": {"gpu": 0.0}}
    launches.refer({**events, "machine": {"levels": levels}})
    slower = {"compute": [0.004, 0.01], "communication": [0.004, 0.01]}
    outcome = LaunchOutcome("ok", points=[Point(2, 1, 0.1, 0.099, 0.101, 1, 0.0, 9)])
    outcome.events = {**events, "machine": {"levels": slower}}
    (point,) = launches._compare(outcome).points
    assert point.seconds == pytest.approx(seconds)
