"""Gathers from each other's memory: the same values as by collectives, met exactly as often as somebody wrote.

GPUs' memory is played by files that all ranks map; tests/gpu/test_peers.py has the real one.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import random
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_hf import initialize
from ds_hf.engine import parts
from ds_hf.engine.comm import collectives, peers
from ds_hf.engine.comm.mesh import Axis, data_parallel_axis
from ds_hf.engine.comm.peers import Peers, Signals, open_peers
from ds_hf.engine.comm.streams import CommStream
from ds_hf.engine.zero.buffer import logical_shape
from ds_hf.engine.zero.gather import GatheredParameters
from tests.engine.zero.zoo import WIDTH, Stack, mean_square
from tests.helpers.distributed import run_distributed
from tests.helpers.parity import base_config, full_weights

CPU = torch.device("cpu")


def peers_in_files(axis: Axis, folder: str) -> Peers:
    count = 0

    def mapping(numel: int, dtype: torch.dtype) -> list[Tensor]:
        nonlocal count
        count += 1
        paths = [Path(folder) / f"{count}.{rank}" for rank in range(axis.world_size)]
        mine = torch.from_file(str(paths[axis.rank]), shared=True, size=numel, dtype=dtype)
        dist.barrier()
        tensors = [torch.from_file(str(path), shared=True, size=numel, dtype=dtype) for path in paths]
        tensors[axis.rank] = mine
        return tensors

    return Peers(axis, CommStream(), mapping, lambda channel: dist.barrier())


class Driver:
    """``cuStreamBatchMemOp_v2`` of streams that stop at a wait: each rank's is a list of what it was given."""

    def __init__(self) -> None:
        self.queues: dict[int, list[tuple[int, int, int, int]]] = {}
        self.passed: list[int] = []  # streams, in the order in which a meeting of theirs ended

    def cuStreamBatchMemOp_v2(self, stream: Any, count: int, asked: Any, flags: int) -> int:  # noqa: N802
        assert (ctypes.sizeof(asked[0]), flags, count) == (48, 0, len(asked))
        new = [(each.operation, each.address, each.value, each.flags) for each in asked]
        self.queues.setdefault(stream.value, []).extend([*new, (0, 0, 0, 0)])
        while any(self.run(each) for each in self.queues):
            pass
        return 0

    def run(self, stream: int) -> bool:
        """Go on as far as ``stream`` gets; whether that is any further."""
        queue, before = self.queues[stream], len(self.queues[stream])
        while queue:
            operation, address, value, flags = queue[0]
            if operation == 2:
                ctypes.c_uint32.from_address(address).value = value
            elif operation == 1:
                assert flags == 1 << 30
                if ctypes.c_int32(ctypes.c_uint32.from_address(address).value - value).value < 0:
                    break
            else:
                self.passed.append(stream)
            queue.pop(0)
        return len(queue) < before


@pytest.mark.parametrize("begun", [0, 2**32 - 2])
def test_signals_hold_each_rank_until_all_have_come(begun: int) -> None:
    driver: Any = Driver()
    places = [torch.full((6,), begun - (begun >> 31 << 32), dtype=torch.int32) for _ in range(3)]
    ranks = [Signals(places, rank, driver, flushes=True) for rank in range(3)]
    for each in ranks:
        each._counts = [begun, begun]
    for _ in range(4):
        driver.passed.clear()
        ranks[0].meet(0, 10)
        ranks[0].meet(0, 10)
        ranks[1].meet(1, 21)  # of the other kind
        ranks[1].meet(0, 11)
        assert driver.passed == []
        ranks[2].meet(0, 12)
        assert sorted(driver.passed) == [10, 11, 12], "the first meeting, and no second"
        ranks[2].meet(0, 12)
        ranks[1].meet(0, 11)
        assert sorted(driver.passed) == [10, 10, 11, 11, 12, 12]
        ranks[0].meet(1, 20)
        ranks[2].meet(1, 22)
        assert sorted(driver.passed[6:]) == [20, 21, 22]


def test_a_driver_that_refuses_is_told() -> None:
    places = [torch.zeros(4, dtype=torch.int32) for _ in range(2)]
    refuses: Any = type("Refuses", (), {"cuStreamBatchMemOp_v2": lambda *_: 801})()
    with pytest.raises(RuntimeError, match="error 801"):
        Signals(places, 0, refuses, flushes=False).meet(0, 1)


def meet_when_needed(folder: str) -> list[int]:
    """Meetings after each of: write, gather, gather, gather of another, write, write of another, gather."""
    axis = data_parallel_axis()
    peers = peers_in_files(axis, folder)
    regions = [peers.region(4, torch.float32) for _ in range(2)]
    meetings = []
    count = 0
    meet = peers._meet

    def counted(channel: int) -> None:
        nonlocal count
        count += 1
        meet(channel)

    peers._meet = counted

    def write(which: int, value: float) -> None:
        regions[which].writing()
        regions[which].mine.fill_(value + axis.rank)
        meetings.append(count)

    def gather(which: int, value: float) -> None:
        full = torch.zeros(8)
        regions[which].gather(full.chunk(2), regions[which].theirs, "values")
        assert full.tolist() == [value] * 4 + [value + 1] * 4
        meetings.append(count)

    write(0, 3)
    write(1, 7)
    gather(0, 3)
    gather(0, 3)
    gather(1, 7)
    write(0, 5)
    write(1, 9)
    gather(1, 9)
    gather(0, 5)
    return meetings


def test_ranks_meet_when_somebody_wrote_and_not_else(tmp_path: Path) -> None:
    expected = [0, 0, 1, 1, 2, 3, 3, 4, 5]
    assert run_distributed(meet_when_needed, 2, str(tmp_path)) == [expected, expected]


def train(folder: str | None, stage: int, more: dict[str, Any], least: int = 0) -> tuple[dict[str, Tensor], int]:
    """Whole weights after some steps with writes from outside between them; gathers and sums by collectives."""
    calls = 0
    originals = collectives._all_gather, collectives._reduce_scatter

    def counting(original: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            return original(*args, **kwargs)

        return counted

    collectives._all_gather, collectives._reduce_scatter = map(counting, originals)
    peers.LEAST_COPIED_NBYTES = least
    parts.open_peers = lambda axis, device, comm_stream: None if folder is None else peers_in_files(axis, folder)
    torch.manual_seed(0)
    model = Stack()
    engine, *_ = initialize(model=model, config=base_config(stage, bf16={"enabled": True}, **more))
    for unit in engine.units:
        for buffer in unit.buffers:
            copied = 2 * sum(logical_shape(param).numel() for param in buffer.params) >= least
            assert (buffer.gathering.region is not None) == (
                folder is not None and buffer.dtype is torch.bfloat16 and copied
            )
            if buffer.gathering.region is not None:
                _delay(buffer.gathering.region)
    torch.manual_seed(engine.axis.rank)
    for step in range(6):
        loss = mean_square(engine(torch.randn(2, WIDTH, dtype=torch.bfloat16)))
        engine.backward(loss)
        engine.step()
        if step == 2:
            with GatheredParameters(model.parameters(), modifier_rank=1):
                if engine.axis.rank == 1:
                    for param in model.parameters():
                        param.data.mul_(0.5)
    weights = full_weights(model)
    engine.destroy()
    collectives._all_gather, collectives._reduce_scatter = originals
    return weights, calls


def train_both(folder: str, stage: int, more: dict[str, Any]) -> None:
    expected, by_collectives = train(None, stage, more)
    found, by_peers = train(folder, stage, more)
    assert by_collectives > 0
    assert by_peers == 0
    rounded = "gradient_accumulation_steps" in more and stage > 1  # by collectives, each before it is added
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=0.02 if rounded else 0, atol=2e-3 if rounded else 0, msg=name
        )


def train_with_small_buffers(folder: str) -> list[int]:
    """Collectives with all buffers gathered and summed by them, the smaller ones, and none."""
    expected, _ = train(None, 2, {})
    calls = []
    for least in (1 << 40, 400, 0):
        found, by_collectives = train(f"{folder}/{least}", 2, {}, least)
        calls.append(by_collectives)
        for name, value in expected.items():
            assert torch.equal(found[name], value), name
    return calls


def test_small_buffers_go_by_collectives(tmp_path: Path) -> None:
    for least in (1 << 40, 400, 0):
        (tmp_path / str(least)).mkdir()
    for every, some, none in run_distributed(train_with_small_buffers, 2, str(tmp_path)):
        assert every > some > none == 0


def _delay(region: Any) -> None:
    """Ranks get out of step."""
    gather = region.gather
    wait = random.Random(dist.get_rank())

    def late(*args: Any) -> None:
        time.sleep(0.004 * wait.random())
        gather(*args)

    region.gather = late


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"gradient_accumulation_steps": 2},
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}},
        {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 40}},
    ],
    ids=["plain", "accumulating", "offloaded", "small parameters whole"],
)
def test_training_is_the_same(tmp_path: Path, stage: int, more: dict[str, Any]) -> None:
    more = {key: {**value, "stage": stage} if isinstance(value, dict) else value for key, value in more.items()}
    run_distributed(train_both, 2, str(tmp_path), stage, more)


def another_torch() -> list[bool]:
    """What is made of peers where torch has no symmetric memory, or one of another form; and where it brings others'
    values."""
    axis = data_parallel_axis()
    found = []
    for memory in (None, object()):
        peers._symmetric_memory = lambda memory=memory: memory
        found.append(peers._made(axis, CPU, CommStream(), flushes=False) is None)

    class Wrong:
        def __init__(self, axis: Axis, device: torch.device, *, flushes: bool) -> None:
            self.meet = lambda channel: dist.barrier()

        def __call__(self, numel: int, dtype: torch.dtype) -> list[Tensor]:
            return [torch.zeros(numel, dtype=dtype) for _ in range(2)]

    peers._Gpus = Wrong
    found.append(peers._made(axis, CPU, CommStream(), flushes=False) is None)
    return found


def test_what_does_not_work_is_not_used() -> None:
    assert run_distributed(another_torch, 2) == [[True] * 3] * 2


def nobody_to_read() -> bool:
    return open_peers(data_parallel_axis(), CPU, CommStream()) is None


def test_the_cpu_uses_collectives() -> None:
    assert run_distributed(nobody_to_read, 2) == [True, True]


def destroyed(folder: str, stage: int) -> list[int]:
    """How many peers there are after each of three engines of the same model, all of which stay in variables."""
    found: list[weakref.ref[Peers]] = []
    count = itertools.count()

    def opened(axis: Axis, device: torch.device, comm_stream: CommStream) -> Peers:
        place = Path(folder) / str(next(count))
        place.mkdir(exist_ok=True)
        made = peers_in_files(axis, str(place))
        found.append(weakref.ref(made))
        return made

    peers.LEAST_COPIED_NBYTES, parts.open_peers = 0, opened
    model, engines, alive = Stack(), [], []
    for _ in range(3):
        engine, *_ = initialize(model=model, config=base_config(stage, bf16={"enabled": True}))
        engine.backward(mean_square(engine(torch.randn(2, WIDTH, dtype=torch.bfloat16))))
        engine.step()
        engine.destroy()
        engines.append(engine)
        gc.collect()
        alive.append(sum(each() is not None for each in found))
    return alive


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_destroyed_engine_gives_the_memory_back(tmp_path: Path, stage: int) -> None:
    """A pool of the GPU's memory is kept as long as there is somebody who could ask it for more."""
    assert run_distributed(destroyed, 2, str(tmp_path), stage) == [[1, 1, 1]] * 2
