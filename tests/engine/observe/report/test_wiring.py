"""A recorded engine: what is told apart, sums against the wall clock, what it costs, and that nothing of it exists
without the key."""

from __future__ import annotations

import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ds_hf.engine.observe.report.files import rank_path
from ds_hf.engine.observe.report.recorder import Recorder
from ds_hf.engine.observe.report.spans import Key
from ds_hf.engine.offload.aio import FileRequest
from ds_hf.engine.offload.link import Arrival
from ds_hf.errors import ConfigError
from tests.engine.observe.report.common import Recorded, make_engine, read_rank, train
from tests.helpers.distributed import run_distributed
from tests.helpers.models import TinyLM, token_batches

SLOW = pytest.mark.slow
STAGES = [0, pytest.param(1, marks=SLOW), pytest.param(2, marks=SLOW), 3]


def train_recorded(folder: Path, stage: int, **more: Any) -> tuple[list[float], int]:
    """Seconds of each of the last six steps, and the tokens of a step."""
    engine = make_engine(stage, folder, **more)
    ends: list[float] = []
    engine.step_hooks.insert(0, lambda engine: ends.append(time.perf_counter()))
    train(engine, 8)
    engine.destroy()
    return [
        after - before for before, after in pairwise(ends[1:])
    ], 16 * engine.batch.micro * engine.batch.accumulation_steps


@pytest.mark.parametrize("stage", STAGES)
def test_sums_explain_the_wall_clock(tmp_path: Path, stage: int) -> None:
    found = run_distributed(train_recorded, 2, tmp_path, stage)
    for rank, (seconds, tokens) in enumerate(found):
        recorded = read_rank(tmp_path, rank)
        assert [step["step"] for step in recorded.steps] == list(range(1, 9))
        assert recorded.ended
        steps = recorded.steps[2:]
        # The median: a process that another one displaces between two readings of the clock loses that time once.
        shares = [step["seconds"] / outside for step, outside in zip(steps, seconds, strict=True)]
        assert statistics.median(shares) >= 0.97, shares
        assert all(step["tokens"] == tokens for step in steps)
        for step in steps:
            told = sum(recorded.by_kind(step).values())
            assert 0 < told <= step["seconds"] * (1 + 1e-6)
        kinds = set().union(*(recorded.by_kind(step) for step in steps))
        assert kinds >= {"compute", "update", "reduction"}
        assert ("gather" in kinds) == (stage > 0)
        check_places(recorded, stage)


def check_places(recorded: Recorded, stage: int) -> None:
    places = recorded.by_place(recorded.steps[-1])
    for index in range(3):
        assert places[f"forward of blocks.{index}"] > 0
        assert places[f"backward of blocks.{index}"] > 0
    assert places["forward of embedding"] > 0
    assert places["forward of head"] > 0
    calls = {key.operation for key in recorded.keys.values() if key.operation}
    assert calls >= ({"all-reduce"} if stage == 0 else {"all-gather", "reduce-scatter"})


def own_backward(folder: Path) -> None:
    engine = make_engine(3, folder)
    for step in range(3):
        loss = engine(token_batches(engine.batch.micro, 16, seed=step))
        loss.backward()
        engine.step()
    engine.destroy()
    places = read_rank(folder).by_place(read_rank(folder).steps[-1])
    assert places["backward of blocks.1"] > 0


def test_a_backward_of_ones_own_is_seen(tmp_path: Path) -> None:
    run_distributed(own_backward, 1, tmp_path)


@pytest.mark.parametrize("way", [pytest.param("reentrant", marks=SLOW), "nonreentrant"])
def test_recomputation_belongs_to_backward(tmp_path: Path, way: Any) -> None:
    run_distributed(checkpointed, 1, tmp_path, way)
    recorded = read_rank(tmp_path)
    spans = recorded.spans(recorded.steps[-1])
    order = [key.place for key, span in spans if key.place.endswith(("blocks.0", "blocks.1", "blocks.2"))]
    assert order[:3] == [f"forward of blocks.{index}" for index in range(3)]
    assert [place for place in dict.fromkeys(order[3:]) if place.startswith("forward")] == []
    assert list(dict.fromkeys(order[3:])) == [f"backward of blocks.{index}" for index in (2, 1, 0)]


def checkpointed(folder: Path, way: Any) -> None:
    engine = make_engine(2, folder, TinyLM(width=32, depth=3, checkpointing=way))
    train(engine, 2)
    engine.destroy()


def same_with_and_without(folder: Path, stage: int) -> None:
    losses = []
    for place in (None, folder):
        engine = make_engine(stage, place)
        losses.append(train(engine, 4))
        before = engine.axis.log.count
        train(engine, 1)
        losses[-1].append(engine.axis.log.count - before)  # collectives of a step
        engine.destroy()
    assert losses[0] == losses[1]


@pytest.mark.parametrize("stage", [pytest.param(0, marks=SLOW), 3])
def test_it_changes_no_number_and_no_collective(tmp_path: Path, stage: int) -> None:
    run_distributed(same_with_and_without, 2, tmp_path, stage)


def leaves_nothing_behind(folder: Path) -> None:
    before = (_BaseDataLoaderIter.__next__, None, None)
    engine = make_engine(3, folder)
    train(engine, 1)
    log = engine.axis.log
    assert log.observer is not None
    other = make_engine(2, folder)  # a second one is not recorded, and trains
    train(other, 1)
    assert not other.events.watched
    engine.destroy()
    assert log.observer is None
    assert (_BaseDataLoaderIter.__next__, Arrival.waits, FileRequest.waits) == before
    assert not engine.events.watched
    assert not any(buffer.waits for unit in engine.units for buffer in unit.buffers)
    train(other, 1)
    other.destroy()


def test_destroy_takes_everything_off_again(tmp_path: Path) -> None:
    run_distributed(leaves_nothing_behind, 1, tmp_path)


def with_loader_and_saves(folder: Path) -> None:
    engine = make_engine(1, folder)
    batches = iter(DataLoader([torch.arange(16) for _ in range(64)], batch_size=engine.batch.micro))
    for step in range(4):
        for _ in range(engine.batch.accumulation_steps):
            engine.backward(engine(next(batches)))
            engine.step()
        if step == 1:
            engine.save_checkpoint(folder / "checkpoint")
        if step == 2:
            engine.eval()
            with torch.no_grad():
                engine(next(batches))
            engine.train()
    engine.destroy()
    recorded = read_rank(folder)
    kinds = [set(recorded.by_kind(step)) for step in recorded.steps]
    assert all("loader" in each for each in kinds)
    assert ["checkpoint" in each for each in kinds] == [False, False, True, False]
    assert ["evaluation" in each for each in kinds] == [False, False, False, True]


def test_loader_checkpoint_and_evaluation_are_told_apart(tmp_path: Path) -> None:
    run_distributed(with_loader_and_saves, 1, tmp_path)


def refused(folder: Path) -> None:
    rank = torch.distributed.get_rank()
    place = folder / "file" / "run" if rank == 1 else folder / "run"
    with pytest.raises(ConfigError, match="Not a directory" if rank == 1 else "rank 1: .*Not a directory"):
        make_engine(1, place)


def test_a_folder_that_one_rank_cannot_write_is_refused_on_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run_distributed(refused, 2, tmp_path)
    assert not rank_path(tmp_path / "run", 0).exists()


def cost(folder: Path) -> tuple[float, float, int]:
    """Processor seconds of a step without a report, of recording one, and the Python calls of that."""
    engine = make_engine(3, None, TinyLM(width=256, depth=4), train_micro_batch_size_per_gpu=8)
    best = 1e9
    batch = token_batches(8, 128)
    for _ in range(4):
        begun = time.process_time()
        engine.backward(engine(batch))
        engine.step()
        best = min(best, time.process_time() - begun)
    engine.destroy()
    engine = make_engine(3, folder, TinyLM(width=256, depth=4), train_micro_batch_size_per_gpu=8)
    (report,) = [hook.__self__ for hook in engine.step_hooks if hasattr(hook, "__self__")]
    recorder: Recorder = report.recorder
    for _ in range(2):
        engine.backward(engine(batch))
        engine.step()
    marks = 2 * len(read_rank(folder).steps[-1]["spans"])
    engine.destroy()
    return best, _recording(recorder.__class__, folder / "alone", marks), marks


def _recording(kind: type[Recorder], folder: Path, marks: int) -> float:
    """The least processor time that so many marks and the end of a step took."""
    from ds_hf.engine.observe.report.files import ReportFile

    folder.mkdir()
    recorder = kind(ReportFile(folder, 0), every=True)
    keys = [recorder.number(Key("compute", f"place {index}")) for index in range(16)]
    best = 1e9
    for step in range(30):
        begun = time.process_time()
        recorder.begin(step + 1)
        for index in range(marks // 2):
            recorder.close(recorder.open(keys[index % 16]))
        recorder.end(step + 1, 8)
        best = min(best, time.process_time() - begun)
    return best


def test_recording_costs_a_hundredth_of_a_step_at_most(tmp_path: Path) -> None:
    ((step, recording, marks),) = run_distributed(cost, 1, tmp_path)
    assert marks < 40 * 6  # for six units
    assert recording <= 0.01 * step, f"{recording * 1e6:.0f} us of {step * 1e3:.1f} ms"
