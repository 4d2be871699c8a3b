"""Ranks of a mesh that diverge: one watch over all axes says who waits for whom in which, and who is late."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_hf import Engine, initialize
from ds_hf.engine.comm import collectives
from tests.helpers.distributed import DistributedFailure, run_distributed
from tests.helpers.megatron import Mpu, divide
from tests.helpers.models import TinyLM
from tests.helpers.parity import base_config


def make(hang_timeout: float = 3.0, stage: int = 2) -> Engine:
    """2 x 2 processes: data-parallel groups 0, 2 and 1, 3; model-parallel groups 0, 1 and 2, 3."""
    torch.manual_seed(1)
    mpu = Mpu(2)
    config = {**base_config(stage), "gradient_clipping": 1.0, "ds_hf": {"hang_timeout": hang_timeout}}
    return initialize(model=divide(TinyLM(), mpu), mpu=mpu, config=config)[0]


def tokens() -> Tensor:
    return torch.arange(12).view(2, 6)


def step(engine: Engine) -> None:
    engine.backward(engine(tokens()))
    engine.step()


def inner(engine: Engine, what: str) -> None:
    """A collective of ours on the tensor axis, as layers that the engine cuts will issue."""
    collectives.all_reduce_sum(torch.ones(4), engine.mesh.axis("tensor"), what)


def leaves_something_out(what: str) -> None:
    engine = make()
    step(engine)
    left_out = dist.get_rank() == 3
    if what == "forward" and left_out:
        engine.step()
    loss = engine(tokens())
    if what != "backward" or not left_out:
        engine.backward(loss)
    if what != "step" or not left_out:
        engine.step()
    step(engine)


def waits_for_one_that_waits(how: str) -> None:
    """0 and 1 wait in "data" for 2 and 3, 2 waits in "tensor" for 3."""
    engine = make()
    step(engine)
    rank = dist.get_rank()
    if rank == 3:
        if how == "stopped":
            time.sleep(0.5)  # it says once more that it is not idle
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(3600)
    if rank == 2:
        inner(engine, "outputs of blocks.1")
    step(engine)


def other_layer_on_an_inner_axis(boards: bool) -> None:
    """On several hosts each process looks round once a second, and does thousands of collectives meanwhile."""
    engine = make(3.0 if boards else 8.0)
    step(engine)
    if not boards:  # as on several hosts: digests tell
        engine.mesh.axis("tensor").log.board = None
    for _ in range(100_000):
        inner(engine, "outputs of blocks.2" if dist.get_rank() == 3 else "outputs of blocks.1")


def uneven() -> tuple[int, bool, list[str]]:
    """Each process computes for longer than the time limit while others wait in some axis, or work in another."""
    engine = make(hang_timeout=2.0)
    rank = dist.get_rank()
    for turn in range(4):
        step(engine)
        for _ in range(12 if rank in (2, 3) else 0):  # longer than the limit in all, but never idle
            time.sleep(0.3)
            inner(engine, "outputs of blocks.1")
        if rank == turn:
            time.sleep(1.0)
    dist.barrier()
    time.sleep(3.0)
    step(engine)
    watch = engine.axis.log.watch
    assert watch is not None
    logs = [engine.mesh.axis(name).log for name in ("data", "tensor")] + [engine.mesh.world.log]
    assert all(log.watch is watch for log in logs)
    threads = [thread.name for thread in threading.enumerate() if thread.name == "ds_hf watch"]
    return len(threads), watch.store.check(["alarm"]), sorted(log.name for log in watch.logs)


def report_of(function: Any, *args: Any) -> str:
    with pytest.raises(DistributedFailure) as failure:
        run_distributed(function, 4, *args, timeout=60)
    return str(failure.value)


@pytest.mark.parametrize("what", ["forward", "backward"])
def test_a_rank_that_leaves_a_pass_out(what: str) -> None:
    """The layers' own collectives of 2 and 3 then meet in the wrong order; 1 is the one that sees it, in "data"."""
    text = report_of(leaves_something_out, what)
    assert "DivergenceError: the ranks of this run issue different collectives in the axis 'data'" in text
    assert "First difference in the axis 'data' of ranks 1, 3: collective" in text
    assert re.search(r"rank 1: reduce-scatter of the gradients of blocks\.2 .*, in the axis 'data'\n", text), text
    assert re.search(r"rank 3: reduce-scatter of the gradients of the model's root .*, in the axis 'data'\n", text), (
        text
    )
    assert "Late" not in text


def test_a_rank_that_leaves_the_step_out() -> None:
    text = report_of(leaves_something_out, "step")
    assert re.search(r"in the axis 'world' for rank 3, which (has issued nothing for|does not answer)", text), text
    assert "Late: rank 3 in the axis 'world'." in text
    waiting = r"ranks? ([\d, -]+): waiting in the axis 'world' for rank 3, for \d+ s: all-reduce of the gradient norm"
    ranks = set[int]()
    for group in re.findall(waiting, text):  # those that have waited for the same number of seconds
        for first, last in re.findall(r"(\d+)(?:-(\d+))?", group):
            ranks.update(range(int(first), int(last or first) + 1))
    assert ranks == {0, 1, 2}, text
    assert re.search(r"rank 3: nothing, for \d+ s; late in the axis 'world'", text)


@pytest.mark.parametrize("how", ["late", "stopped"])
def test_late_is_who_waits_for_nobody(how: str) -> None:
    text = report_of(waits_for_one_that_waits, how)
    assert "Late: rank 3 in the axes 'data' and 'tensor'." in text
    assert "First difference in the axis 'tensor' of ranks 2-3: collective" in text or how == "stopped"
    # ranks 0 and 1 share a paragraph where they have waited for as many seconds
    ranks = r"(rank 0|ranks 0-1): waiting in the axis 'data' for (rank 2|ranks 2-3)"
    assert re.search(rf"{ranks}, for \d+ s: reduce-scatter of the gradients of blocks\.2", text), text
    outputs = r"all-reduce of outputs of blocks\.1 \(4 x float32\); late itself in the axis 'data'"
    assert re.search(rf"rank 2: waiting in the axis 'tensor' for rank 3, for \d+ s: {outputs}", text), text
    if how == "stopped":
        assert "Rank 3 does not answer" in text
    else:
        assert re.search(r"rank 3: nothing, for \d+ s; late in the axes 'data' and 'tensor'", text)
        assert text.index("rank 3: nothing") < text.index("rank 2: waiting"), "who is late comes first"


@pytest.mark.parametrize("boards", [True, False], ids=["one host", "several hosts"])
def test_other_layers_on_an_inner_axis(boards: bool) -> None:
    text = report_of(other_layer_on_an_inner_axis, boards)
    assert "the ranks of this run issue different collectives in the axis 'tensor'" in text
    assert "First difference in the axis 'tensor' of ranks 2-3: collective" in text
    assert "rank 2: all-reduce of outputs of blocks.1 (4 x float32), in the axis 'tensor'" in text
    assert "rank 3: all-reduce of outputs of blocks.2 (4 x float32), in the axis 'tensor'" in text
    assert "Late" not in text


@pytest.mark.slow
def test_ranks_of_uneven_speed_are_left_alone() -> None:
    for found in run_distributed(uneven, 4, timeout=90):
        assert found == (1, False, ["data", "tensor", "world"])
