"""Ranks that diverge end with the first collective that differs, its module, and where each of them is."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hf import Engine, initialize
from ds_hf.engine.comm import collectives
from ds_hf.engine.comm.watch import Watch
from tests.helpers.distributed import DistributedFailure, run_distributed, run_torchrun
from tests.helpers.interpreter import torchrun
from tests.helpers.parity import base_config

SGD = {"type": "SGD", "params": {"lr": 0.05}}
SCRIPT = Path(__file__).parent / "diverging_script.py"


class Branches(nn.Module):
    """Calls the branch that it is told to."""

    def __init__(self, widths: tuple[int, int]) -> None:
        super().__init__()
        self.common = nn.Linear(4, 4)
        self.branches = nn.ModuleList(nn.Sequential(nn.Linear(4, width), nn.Linear(width, 4)) for width in widths)

    def forward(self, x: Tensor, branch: int) -> Tensor:
        return self.branches[branch](self.common(x)).square().mean()


def make(widths: tuple[int, int] = (4, 4), stage: int = 3, hang_timeout: float = 2.0) -> Engine:
    torch.manual_seed(1)
    config = {**base_config(stage, optimizer=SGD), "ds_hf": {"hang_timeout": hang_timeout}}
    return initialize(model=Branches(widths), config=config)[0]


def step(engine: Engine, branch: int) -> None:
    engine.backward(engine(torch.ones(2, 4), branch))
    engine.step()


def other_branch_on_rank_1(widths: tuple[int, int]) -> None:
    engine = make(widths)
    for _ in range(3):
        step(engine, 0)
    step(engine, dist.get_rank())


def one_rank_computes_for_ever() -> None:
    engine = make()
    step(engine, 0)
    if dist.get_rank() == 1:
        wait_for_ever()
    step(engine, 0)


def wait_for_ever() -> None:
    time.sleep(3600)


@pytest.mark.parametrize("widths", [(4, 4), (4, 300)], ids=["same size", "other size"])
def test_other_layers_on_one_rank(widths: tuple[int, int]) -> None:
    """Of the same size the weights would be mixed up without a word; of another size gloo would abort."""
    with pytest.raises(DistributedFailure) as failure:
        run_distributed(other_branch_on_rank_1, 2, widths, timeout=50)
    text = str(failure.value)
    assert "DivergenceError: the ranks of this run issue different collectives" in text
    assert "First difference: collective" in text
    assert re.search(r"rank 0: .* of branches\.0 ", text), text  # whose weights rank 1 fetches ahead as well
    assert "rank 1: all-gather of the weights of branches.1" in text
    assert text.count("in other_branch_on_rank_1") >= 2, "the stacks of both ranks"


def test_a_rank_that_does_not_come() -> None:
    with pytest.raises(DistributedFailure) as failure:
        run_distributed(one_rank_computes_for_ever, 2, timeout=50)
    text = str(failure.value)
    assert "waits for rank 1, which has issued nothing for" in text
    assert "rank 0: all-gather of the weights of the model's root" in text
    assert "rank 1: nothing, for" in text
    assert "in wait_for_ever" in text


def does_not_come(how: str) -> None:
    engine = make(hang_timeout=3.0)
    step(engine, 0)
    late = int(how.endswith("1"))
    if dist.get_rank() == late:
        time.sleep(0.5)  # it says once more that it is not idle
        if how.startswith("stopped"):
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            ctypes.PyDLL(None).sleep(60)  # a call that keeps the interpreter's lock
    step(engine, 0)


@pytest.mark.parametrize(
    "how", ["stopped, rank 1", pytest.param("lock held, rank 1", marks=pytest.mark.slow), "stopped, rank 0"]
)
def test_a_rank_that_cannot_run_python(how: str) -> None:
    """It has said that it is not idle, and can say nothing since; rank 0 also keeps the store."""
    with pytest.raises(DistributedFailure) as failure:
        run_distributed(does_not_come, 2, how, timeout=50)
    text = str(failure.value)
    if how.endswith("0"):
        assert "rank 1 has issued nothing for" in text
        assert "the store of the process group has not answered" in text
    else:
        assert "rank 0 waits for rank 1, which does not answer: nothing was heard of it for" in text
    assert f"Rank {how[-1]} does not answer" in text
    assert re.search(r"rank [01]: all-gather of the weights of the model's root", text)
    assert "in does_not_come" in text


def stopped_and_continued() -> bool:
    """Both stand still for longer than the time limit, and go on; the one that wakes first may not blame the other."""
    engine = make(hang_timeout=1.0)
    step(engine, 0)
    subprocess.Popen(["sh", "-c", f"sleep 2.5; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)
    step(engine, 0)
    time.sleep(1.5)
    step(engine, 1)
    watch = engine.axis.log.watch
    assert watch is not None
    return watch.store.check(["alarm"])


def test_processes_that_were_stopped_together_go_on() -> None:
    assert run_distributed(stopped_and_continued, 2, timeout=50) == [False, False]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("return", "rank 1: ended before it"),
        pytest.param("evaluate", "rank 1: all-gather of the weights of 0", marks=pytest.mark.slow),
        # its own traceback; no hang of the other
        pytest.param("raise", "ValueError: the data of rank 1 are bad", marks=pytest.mark.slow),
    ],
)
def test_scripts(how: str, expected: str) -> None:
    """Under torchrun: a rank raises, has fewer batches than the other, or alone evaluates."""
    run = torchrun if how == "return" else run_torchrun  # nothing of it is the real one's
    with pytest.raises(DistributedFailure) as failure:
        run(SCRIPT, how, world_size=2, timeout=60)
    assert expected in str(failure.value)


@pytest.mark.slow
def test_a_rank_may_end_before_the_others() -> None:
    """Equally far, after a rest: nobody has diverged."""
    assert "DivergenceError" not in run_torchrun(SCRIPT, "early", world_size=2, timeout=60)


def healthy(stage: int) -> tuple[int, int, bool]:
    engine = make(stage=stage, hang_timeout=5.0)  # a rank may be late by that on a busy machine
    for _ in range(3):
        step(engine, 0)
    time.sleep(6.0)  # longer than the time limit: all ranks are equally far
    step(engine, 1)
    watch = engine.axis.log.watch
    assert watch is not None
    return engine.axis.log.count, engine.axis.log.digest, watch.store.check(["alarm"])


@pytest.mark.parametrize("stage", [1, 3])
def test_healthy_ranks_have_the_same_log_and_are_left_alone(stage: int) -> None:
    first, second = run_distributed(healthy, 2, stage, timeout=60)
    assert first == second
    assert first[0] > 10
    assert not first[2]


def several_engines() -> list[bool]:
    """Engines of one process share the log and the thread; none is left without."""
    engines = [make(), make(stage=1, hang_timeout=7.0), make(hang_timeout=0)]
    step(engines[0], 0)
    logs = {id(engine.axis.log) for engine in engines}
    watch = engines[0].axis.log.watch
    assert isinstance(watch, Watch)
    return [len(logs) == 1, watch.timeout == float("inf")]


def test_engines_share_a_watch() -> None:
    assert run_distributed(several_engines, 2, timeout=60) == [[True, True]] * 2


def hosts_apart(widths: tuple[int, int]) -> None:
    """Without shared memory, as on two hosts, equal sizes do not hang: digests tell."""
    engine = make(widths, hang_timeout=4.0)
    engine.axis.log.board = None
    for _ in range(100_000):
        collectives.all_reduce_sum(torch.ones(4), engine.axis, f"branch {dist.get_rank()}")


def test_ranks_on_other_hosts() -> None:
    with pytest.raises(DistributedFailure) as failure:
        run_distributed(hosts_apart, 2, (4, 4), timeout=60)
    assert "issue different collectives" in str(failure.value)


def alone() -> Any:
    return make().axis.log.watch


def test_one_process_has_no_watch() -> None:
    assert run_distributed(alone, 1, timeout=60) == [None]
